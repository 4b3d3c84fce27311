"""The layout of netcl's objects: tensors, nodes and tapes, modules, optimizers.

A new netcl release is met here, in ``clamp.patching``, which puts wrappers over netcl, and in ``clamp.recordings``: no
other room imports netcl or touches its private parts (``clamp.cli`` measures it). The rest of clamp uses these names.
"""

from clamp.bridge.autograd import *
from clamp.bridge.device_memory import *
from clamp.bridge.masters import *
from clamp.bridge.modules import *
from clamp.bridge.objects import *
from clamp.bridge.optimizers import *
from clamp.bridge.tensors import *
from clamp.bridge.updates import *
