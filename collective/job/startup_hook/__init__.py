"""Has the one module that Python imports by itself when a rank starts (`sitecustomize`)."""
