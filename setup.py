"""Where the sub-packages lie: `launch/`, `strategies/` and `ops/` at the top are `collective.launch` and so on.

A checkout runs uninstalled through the links in `collective/`; a wheel gets the folders themselves, each module once.
All other metadata is in pyproject.toml.
"""
from setuptools import Extension, find_packages, setup

SUBPACKAGES = ['launch', 'strategies', 'ops']

package_dir = {'collective': 'collective'}
packages = ['collective']
for folder in SUBPACKAGES:
    package_dir[f'collective.{folder}'] = folder
    packages += [f'collective.{folder}', *(f'collective.{folder}.{inner}' for inner in find_packages(folder))]
links = [pattern for folder in SUBPACKAGES for pattern in (folder, f'{folder}.*')]
packages += [f'collective.{inner}' for inner in find_packages('collective', exclude=links)]

setup(
    license='Apache-2.0',
    packages=packages,
    package_dir=package_dir,
    package_data={'collective': ['py.typed'], 'collective.ops': ['*.cu', '*.cuh', '*.cc', '*.h']},
    # Else the links' contents count as data of `collective`, and every module is there twice.
    include_package_data=False,
    zip_safe=False,
    # No Python module, but a library with a C interface (see ops/keymap.py): it needs g++ only, no headers of Python.
    ext_modules=[Extension('collective.ops._keymap', ['ops/keymap.cc'], language='c++',
                           extra_compile_args=['-std=c++17', '-O3', '-fvisibility=default'])],
)
