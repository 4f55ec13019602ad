"""A replacement for the `optimization.py` of TF1's BERT scripts, with the signatures of NVIDIA's version.

In the script, write `import tfmp.bert as optimization` in place of `import optimization`. For Google's scripts, write
`from tfmp.bert import google as optimization`. Each name is imported on its first use.

The two optimizer classes increment the global step in `apply_gradients`, which the original classes do not. A script
that keeps its own `create_optimizer`, and replaces only the optimizer class, must therefore delete its line that
assigns `global_step + 1`.
"""

from tfmp.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, __file__)
