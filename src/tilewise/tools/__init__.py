"""The commands of `tilewise`, and the models, workloads and benchmarks that they use."""
