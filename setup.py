"""What pyproject.toml cannot say: every folder of the checkout's parts is a package below `modelyard`."""

from setuptools import find_namespace_packages, setup

# Triton loads the backends as files, and the server finds them beside itself.
PARTS = ("export", "server", "client", "gateway", "backends")

setup(
    packages=["modelyard"]
    + [
        f"modelyard.{name}"
        for part in PARTS
        for name in (part, *(f"{part}.{sub}" for sub in find_namespace_packages(part, exclude=["*__pycache__"])))
    ],
    package_dir={"modelyard": "modelyard"} | {f"modelyard.{part}": part for part in PARTS},
    package_data={"": ["*.txt", "*.html"]},
)
