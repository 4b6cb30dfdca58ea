"""Attention over a latent cache on Hopper: one KV head of 576 columns, whose first 512 are the values too. Decode, and
with key indices (every query its own keys) prefill as well.

    HBM/L2 --TMA--> two blocks of 64 keys in shared memory --wgmma--> S, P, O in registers --> HBM

A tile is 64 query rows (heads, then queries). Its output of 512 columns is held by two consumer warpgroups, 256 each.
They process pairs of blocks: consumer 0 scores the first block of a pair, consumer 1 the second, and each sends its
weights to the other through shared memory, since both halves of the output need both. Files: tile_scheduler.py (which
keys belong to which program), producer.py, gather.py (the producer of calls with key indices), consumer.py, scores.py,
softmax.py, narrow.py (the consumers of few query rows), pipeline.py (shared memory and barriers between those),
epilogue.py, combine.py and inside.py (sequences split over several programs), kernel.py, config.py (what is served),
launch.py.
"""
