"""Maps the top-level folders `launch/`, `strategies/` and `ops/` to `collective.launch` and so on.

A checkout runs uninstalled through the links in `collective/`; a wheel gets the folders themselves,
each module once. README.md becomes the description, with absolute links. All other metadata is in
pyproject.toml.
"""

import contextlib
import glob
import os
import re
import sys

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

# pip looks for a TensorFlow of another Python before it reads `requires-python`.
if not (3, 9) <= sys.version_info[:2] < (3, 14):
    sys.exit(
        "collective needs a Python from 3.9 to 3.13, for which there is a TensorFlow 2.15 to 2.21; "
        f"this is Python {sys.version.split()[0]}. Make an environment of one of them, or run "
        "`make setup` in the checkout, which fetches one"
    )

SUBPACKAGES = ["launch", "strategies", "ops"]
OPTIMIZED = ["-std=c++17", "-O3", "-g0"]

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

# Libraries, no Python modules: any Python loads them, by ctypes or TensorFlow. The key map has a C
# interface (see ops/rows/keymap.py).
keymap = Extension(
    "collective.ops._keymap",
    ["ops/native/keymap.cc"],
    language="c++",
    depends=["ops/native/keymap.h"],
    extra_compile_args=[*OPTIMIZED, "-fvisibility=default"],
)
# Preloaded into ranks, so that Horovod listens where the launcher says (see
# collective/job/gloo_address.py).
gloo_address = Extension(
    "collective.ops._gloo_address",
    ["ops/native/gloo_address.cc"],
    language="c++",
    extra_compile_args=[*OPTIMIZED, "-fno-exceptions", "-fvisibility=hidden"],
    # Every process below a rank loads it: no library comes along that it doesn't need.
    extra_link_args=["-Wl,--as-needed", "-ldl"],
)
# Operations of TensorFlow (see ops/exchange/embedding_bag.py), and the rows of dynamic tables (see
# ops/rows/compiled_row_store.py). Without contraction a sum, and an initial value, is the same on
# every processor.
native = Extension(
    "collective.ops._native",
    ["ops/native/native.cc"],
    language="c++",
    depends=sorted(glob.glob("ops/native/**/*.*", recursive=True)),
)


def version():
    """Reads the version where it is written; an import would read more."""
    with open("collective/version.py", encoding="utf-8") as file:
        return re.search('^__version__ = "(.+)"$', file.read(), re.MULTILINE).group(1)


def description():
    """Reads README.md. Its links lead to the files of this version, wherever it is shown."""
    with open("pyproject.toml", encoding="utf-8") as file:
        homepage = re.search('^Homepage = "(.+)"$', file.read(), re.MULTILINE).group(1)
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    raw = homepage.replace("//github.com/", "//raw.githubusercontent.com/")
    pages, pictures = f"{homepage}/blob/v{version()}", f"{raw}/v{version()}"

    def absolute(link):
        is_picture = link["target"].endswith((".svg", ".png"))
        return f"]({pictures if is_picture else pages}/{link['target']})"

    return re.sub(r"\]\((?P<target>(?!https?:|#)[^)\s]+)\)", absolute, text)


def tensorflow():
    """Imports the TensorFlow against which the operations are compiled."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SetupError(
            f"collective compiles its operations against TensorFlow, which can not be imported "
            f"here ({error}). Either leave out --no-build-isolation, and `pip install .` brings "
            "TensorFlow along for the build, or install TensorFlow first: pip install "
            "'tensorflow>=2.15.1,<2.22'"
        ) from error
    return tf


class Build(build_ext):
    """Compiles the libraries, the operations against the TensorFlow that is installed here.

    pip's isolated build installs one for that (`requires` in pyproject.toml).
    """

    def get_ext_filename(self, fullname):
        """Names a library by what it is built for: a TensorFlow or none, but no Python."""
        name = os.path.join(*fullname.split("."))
        if fullname.rpartition(".")[2] == "_native":
            with contextlib.suppress(SetupError):  # Metadata, which need no TensorFlow, ask too.
                name = f"{name}.tensorflow-{tensorflow().__version__}"
        return f"{name}.so"

    def build_extensions(self):
        tf = tensorflow()
        native.extra_compile_args = [
            # as the system's headers: they redefine each other's macros
            *(re.sub("^-I", "-isystem", flag) for flag in tf.sysconfig.get_compile_flags()),
            *OPTIMIZED,
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-strict-aliasing",
            "-fvisibility=hidden",
            "-Wno-sign-compare",
            # From 2.20 on TensorFlow's errors:: are; 2.15 has no others that take several words.
            "-Wno-deprecated-declarations",
        ]
        native.extra_link_args = tf.sysconfig.get_link_flags()
        self._forget_library_folders()
        try:
            super().build_extensions()
        except CompileError as error:
            raise CompileError(
                f"collective's operations were not compiled: {error}. They need a g++ that "
                "compiles C++17, as `apt-get install g++` brings it"
            ) from error

    def _forget_library_folders(self):
        """Drops run-time search paths, which name folders of the machine that built Python."""
        for name in ("linker_so", "linker_so_cxx"):
            words = getattr(self.compiler, name, None)
            if words:
                kept = [word for word in words if not word.startswith("-Wl,-rpath")]
                setattr(self.compiler, name, kept)


setup(
    license="Apache-2.0",
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=packages,
    package_dir=package_dir,
    package_data={
        "collective": ["py.typed"],
        "collective.profiling.report": ["templates/*.jinja2"],
        "collective.ops": ["native/**/*.cc", "native/**/*.h"],
        "collective.ops.gpu": ["*.cu", "*.cuh"],
    },
    # Else the links' contents count as data of `collective`, and every module is there twice.
    include_package_data=False,
    zip_safe=False,
    ext_modules=[keymap, gloo_address, native],
    cmdclass={"build_ext": Build},
    # One wheel for all Pythons.
    options={"bdist_wheel": {"py_limited_api": "cp39"}},
)
