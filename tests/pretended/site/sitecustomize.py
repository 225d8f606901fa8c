"""Python imports this file at start-up if the folder is on `PYTHONPATH`; importing torch then adds the pretended
device.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class _WithTorch(importlib.abc.MetaPathFinder):
    """Run `boot.py` as soon as torch is imported, before other code keeps a reference to `torch.cuda.Event`."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            file = os.path.join(os.path.dirname(HERE), "boot.py")
            of_boot = importlib.util.spec_from_file_location("pretended_boot", file)
            sys.modules["pretended_boot"] = boot = importlib.util.module_from_spec(of_boot)
            of_boot.loader.exec_module(boot)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("LIGHTNING_AMP_PRETEND"):
    # At exit, stopping the device's backward threads races with the end of Python itself.
    os.environ.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")
    sys.meta_path.insert(0, _WithTorch())
