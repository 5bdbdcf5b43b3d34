"""Run before lightning is imported, which imports torchvision where that is installed, whether or not it loads.

The default build of torchvision is for a torch with CUDA. Beside one without, its import ends at operators that its
library would have defined; with bare definitions of them it gets through, which is all that is wanted of it.
"""

import subprocess
import sys

import torch

if subprocess.run([sys.executable, "-c", "import torchvision"], stderr=subprocess.DEVNULL).returncode:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
