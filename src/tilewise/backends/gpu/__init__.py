"""What the GPU backends share: driver launches, semaphores, block sparsity, varlen order, the device target."""
