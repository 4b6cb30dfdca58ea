"""Runs a transformers model over several processes, with its sequence or its heads sharded.

    torchrun --standalone --nproc-per-node 2 examples/parallel.py train                 # tokens are sharded
    torchrun --standalone --nproc-per-node 2 examples/parallel.py train --accelerate    # the same with accelerate
    torchrun --standalone --nproc-per-node 2 examples/parallel.py generate              # heads, by tp_plan="auto"

`train` prints the loss and the norm of the gradient at each step; they equal those of a single process up to rounding.
The model is a small Llama with random weights, trained on the bytes of Python's standard library; `--model` names
another. `generate` and `--accelerate` need the package accelerate.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile

import torch
import torch.distributed as dist
import transformers
from gpt import read_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

import tilewise.compat.transformers  # noqa: F401 (registers attn_implementation="tilewise")
from tilewise import distributed

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}


def make(name=None):
    """A model with the same weights on every process."""
    torch.manual_seed(0)
    if name:
        return transformers.AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attn_implementation="tilewise"))


def train(options, device):
    """Trains on long sequences, each process on its part; returns (loss, norm of the gradient) of each step."""
    model = make(options.model).to(device).train()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if options.accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=device.type == "cpu")
        model, optimizer = accelerator.prepare(model, optimizer)  # averages gradients over all processes
    text = torch.tensor(list("".join(read_text()[:2000]).encode()))
    found = []
    for step in range(options.steps):
        tokens = text[step * options.length :][: options.length + 1][None].to(device)  # the same on every process
        inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()  # shifted before sharding
        places = torch.arange(inputs.shape[1], device=device)[None]
        with distributed.context_parallel(mesh, buffers=[inputs, labels, places], buffer_seq_dims=[1, 1, 1]):
            logits = model(input_ids=inputs, position_ids=places, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / options.length
            if options.accelerate:
                accelerator.backward(loss * accelerator.num_processes)  # turns its mean of gradients into their sum
            else:
                loss.backward()
        for parameter in () if options.accelerate else model.parameters():
            dist.all_reduce(parameter.grad)
        whole = loss.detach()
        dist.all_reduce(whole)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(whole), float(norm)))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {found[-1][0]:.4f}, norm of the gradient {found[-1][1]:.4f}")
    return found


def generate(options, device):
    """Generates with a model whose heads transformers shards; attention sees this process's heads."""
    with tempfile.TemporaryDirectory() as folder:
        where = [options.model or folder]
        dist.broadcast_object_list(where)  # the first process's folder, which all read
        if not options.model:
            make().save_pretrained(where[0])
        dist.barrier()
        plan = transformers.distributed.DistributedConfig(tp_plan="auto")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where[0], attn_implementation="tilewise", distributed_config=plan
        )
        dist.barrier()
    prompt = torch.tensor([list(b"import ")], device=device)
    made = model.generate(prompt, max_new_tokens=options.steps, do_sample=False, pad_token_id=0)[0].tolist()
    weight = model.model.layers[0].self_attn.q_proj.weight
    rows = len(weight.to_local() if isinstance(weight, DTensor) else weight)
    if dist.get_rank() == 0:
        print(f"tokens {made[prompt.shape[1] :]}; {rows} rows of the first layer's q_proj on this process")
    return made, rows


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "generate"])
    parser.add_argument("--accelerate", action="store_true", help="train with accelerate's Accelerator")
    parser.add_argument("--model", help="a folder or name that transformers can load")
    parser.add_argument("--steps", type=int, default=4, help="steps, or tokens to generate")
    parser.add_argument("--length", type=int, default=512, help="tokens of the sharded sequence")
    options = parser.parse_args(words)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group()
    try:
        return {"train": train, "generate": generate}[options.what](options, device)
    finally:
        if ours:
            gc.collect()  # cycles of the model keep the group's threads running: Python aborts if one is when it exits
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
