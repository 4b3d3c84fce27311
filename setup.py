"""The packages of a wheel, found; what else there is to say stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["clamp", "clamp.*"]), "clamp.kernels", "clamp.lists"])
