"""Names what TensorFlow, its Estimators and Keras keep private: one module for each area.

Nothing else in the library imports private modules of these packages. What another release moves or
renames is found here.
"""
