"""CPU, CUDA and Ascend NPU behind one small protocol.

A name or a host comes in; a device, its environment or a list of faults goes out. `host`,
`protocol` and `ascend_*` load no torch.
"""
