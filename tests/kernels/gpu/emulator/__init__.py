"""Runs CUDA on a CPU: kernels are compiled by g++ after `cuda_on_cpu.h`, whose first lines say how
they run.
"""

from tests.kernels.gpu.emulator.device import EmulatedDevice as EmulatedDevice
from tests.kernels.gpu.emulator.device import KernelError as KernelError
