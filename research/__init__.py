"""Studies: what each part of a kernel is worth, what a choice costs, what the papers' models say; no user runs them.

Nothing here is part of the wheel, and neither leanconv nor report imports it. ``python -m research`` in the root of the
repository lists the commands. ``kernels`` has the variants of kernels that calls do not have, ``results`` what was
measured; ``python -m research pages`` puts it into the pages of docs/.
"""
