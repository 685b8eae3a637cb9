"""CPU, CUDA and Ascend NPU behind one small protocol."""
