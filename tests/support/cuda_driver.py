"""Builds of torch with CUDA, on machines without a GPU."""

import pytest
import torch


# Where such a build has neither, `torch.Stream()` and fake tensors of "cuda:0" raise for want of a driver; a build for
# the CPU alone has streams of the CPU, and pretends any device.
no_driver = torch.backends.cuda.is_built() and not torch.cuda.is_available()
needs_driver = pytest.mark.skipif(no_driver, reason="this build of torch asks for a CUDA driver, and there is none")
