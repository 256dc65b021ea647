"""
Under torch.compile
===================

The layers of `leanconv.torch` are operators with fake kernels and gradients, so
``fullgraph=True`` holds: a compiled graph has them as nodes, and what is around them is fused
as ever. Here the graph is shown in place of being compiled further, which needs no compiler.
"""

import matplotlib.pyplot as plt
import torch

import leanconv.torch

nodes = []


def show(graph, inputs):
    """What torch.compile calls a backend: it is given the graph, and returns what runs it."""
    nodes.extend(node for node in graph.graph.nodes if node.op.startswith("call"))
    return graph.forward


torch.manual_seed(0)
layer, head = leanconv.torch.Conv2d(3, 8, 3, padding=1), leanconv.torch.Conv2d(8, 1, 1)


def model(x):
    return torch.sigmoid(head(torch.relu(layer(x)) * 2))


x = torch.randn(2, 3, 32, 32)
compiled = torch.compile(model, backend=show, fullgraph=True)
assert torch.allclose(compiled(x), model(x), atol=1e-6)

names = [str(getattr(node.target, "__name__", node.target)) for node in nodes]
print(names)

figure, axis = plt.subplots(figsize=(9, 1.6), layout="constrained")
for i, name in enumerate(names):
    ours = "conv" in name
    box = {
        "boxstyle": "round,pad=0.6",
        "facecolor": "#f4c7a1" if ours else "#e8e8e8",
        "edgecolor": "#8c8c8c",
    }
    axis.annotate(name, (i, 0), ha="center", va="center", fontsize=9, bbox=box)
    if i:
        axis.annotate(
            "",
            (i - 0.32, 0),
            (i - 0.68, 0),
            arrowprops={"arrowstyle": "->", "color": "#8c8c8c"},
        )
axis.set(
    xlim=(-0.6, len(names) - 0.4),
    ylim=(-1, 1),
    title="the graph of a forward pass; orange is leanconv's",
)
axis.set_axis_off()
plt.show()
