"""Find the packages; all else that an installation needs is in setup.cfg.

The repository keeps the layers at its top level; installed, they are distconv.layers.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["distconv", "distconv.*"]), "distconv.layers"],
    package_dir={"distconv": "distconv", "distconv.layers": "layers"},
)
