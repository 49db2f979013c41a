"""Imported by the process that ranks are forked from: what each of them would import anew, five seconds of computing.

A rank is a process of its own all the same, with its own model, optimizer and process group: none exists here yet.
"""

import torch._dynamo  # the optimizer's first step imports it

from rltop.train.megatron.compat import load_megatron

assert torch._dynamo
load_megatron()
