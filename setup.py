"""Maps the top-level folders `launch/`, `strategies/` and `ops/` to `collective.launch` and so on.

A checkout runs uninstalled through the links in `collective/`; a wheel gets the folders themselves,
each module once. All other metadata is in pyproject.toml.
"""

import glob
import os

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SUBPACKAGES = ["launch", "strategies", "ops"]
OPTIMIZED = ["-std=c++17", "-O3"]

package_dir = {"collective": "collective"}
packages = ["collective"]
for folder in SUBPACKAGES:
    package_dir[f"collective.{folder}"] = folder
    packages += [
        f"collective.{folder}",
        *(f"collective.{folder}.{inner}" for inner in find_packages(folder)),
    ]
links = [pattern for folder in SUBPACKAGES for pattern in (folder, f"{folder}.*")]
packages += [f"collective.{inner}" for inner in find_packages("collective", exclude=links)]

# Libraries, no Python modules. The key map has a C interface (see ops/keymap.py), so it needs no
# headers of Python.
keymap = Extension(
    "collective.ops._keymap",
    ["ops/keymap.cc"],
    language="c++",
    extra_compile_args=[*OPTIMIZED, "-fvisibility=default"],
)
# Operations of TensorFlow (see ops/embedding_bag.py). Without contraction a sum is the same on
# every processor.
native = Extension(
    "collective.ops._native",
    ["ops/native/native.cc"],
    language="c++",
    depends=sorted(glob.glob("ops/native/*")),
)


class Build(build_ext):
    """Compiles the operations against the installed TensorFlow; without one it leaves them out."""

    def finalize_options(self):
        super().finalize_options()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        try:
            import tensorflow as tf
        except ImportError as error:
            print(
                f"collective: TensorFlow can not be imported here ({error}), so the compiled "
                "operations are left out. To have them, build beside TensorFlow, with "
                "--no-build-isolation."
            )
            self.extensions = [
                extension for extension in self.extensions if extension.name != native.name
            ]
            return
        native.extra_compile_args = [
            *tf.sysconfig.get_compile_flags(),
            *OPTIMIZED,
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-strict-aliasing",
            "-fvisibility=hidden",
            "-g0",
            "-Wno-sign-compare",
        ]
        native.extra_link_args = tf.sysconfig.get_link_flags()


setup(
    license="Apache-2.0",
    packages=packages,
    package_dir=package_dir,
    package_data={
        "collective": ["py.typed"],
        "collective.ops": ["*.cu", "*.cuh", "*.cc", "*.h", "native/*.cc", "native/*.h"],
        "collective.ops.gpu": ["*.cu", "*.cuh"],
    },
    # Else the links' contents count as data of `collective`, and every module is there twice.
    include_package_data=False,
    zip_safe=False,
    ext_modules=[keymap, native],
    cmdclass={"build_ext": Build},
)
