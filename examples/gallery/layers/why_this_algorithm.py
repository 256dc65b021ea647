"""
Why this algorithm?
===================

`leanconv.explain` says what would run for a problem, and why nothing else would. Nothing is
computed, so it answers for a GPU that is not there: an H200.
"""

import re

import matplotlib.pyplot as plt

import leanconv

# n images of c channels, h rows and w columns; k filters of r rows and s columns
problem = leanconv.ConvProblem(n=8, c=64, h=56, w=56, k=64, r=3, s=3, padding=(1, 1, 1, 1))
choice = leanconv.explain(problem, device="cuda")
print("it runs", choice.chosen)
print("native_gemm cannot, since")
print(*choice.others["native_gemm"], sep="\n")

# %%
# ``print(choice)`` shows all of it. Of those that could run, it says how much longer they are
# expected to take:

expected = {choice.chosen: 1.0}
for name, reasons in choice.others.items():
    if found := re.search(r"expected to take ([\d.]+) times", reasons[0]):
        expected[name] = float(found[1])
expected = dict(sorted(expected.items(), key=lambda each: each[1]))

figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.barh(
    [*expected], [*expected.values()], color=["#d55e00", *["#8c8c8c"] * (len(expected) - 1)]
)
axis.set(xlabel="expected time, that of the chosen algorithm = 1", xlim=(0, None))
axis.invert_yaxis()
plt.show()
