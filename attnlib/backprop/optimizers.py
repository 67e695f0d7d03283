# Made from book/12_backward_network.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""The optimizers that turn gradients into steps, in NumPy.

Derived in chapter 12, "A network without autograd" (book/12_backward_network.ipynb).
"""

import numpy as np

from attnlib.backprop.base import Layer
from attnlib.backprop.checks import require_rate


def zeros_like_parameters(layer: Layer) -> dict[str, np.ndarray]:
    """For each parameter an array of zeros, by name, in float32 at least.

    Running means of float16 would lose small gradients, and ε with them.

    Source: chapter 12, eq-momentum, eq-adam-moments.
    """
    return {
        name: np.zeros(array.shape, np.result_type(array, np.float32))
        for name, array in layer.parameters().items()
    }


class Adam:
    """θ ← θ - η m̂ / (√v̂ + ε), with running means m of the gradient and v of its square.

    Args:
        layer: whose parameters are changed, in place, after each of its backwards.
        lr: the learning rate η, the length of a step while a gradient stays the same.
        betas: β₁ and β₂ in [0, 1), the memories of the two means.
        eps: ε, which keeps the quotient finite.

    Attributes:
        lr: may be changed between steps.
        steps: the number of steps made, t.

    Raises:
        ValueError: lr, a beta or eps outside its range.

    Source: chapter 12, eq-adam-moments, eq-adam-bias, eq-adam-step; Kingma and Ba
    (2015), algorithm 1.
    """

    def __init__(
        self,
        layer: Layer,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.layer, self.lr = layer, require_rate("lr", lr)
        self.eps = require_rate("eps", eps)
        self.betas = tuple(require_rate("betas", beta, below=1.0) for beta in betas)
        self.means = zeros_like_parameters(layer)
        self.squares = zeros_like_parameters(layer)
        self.steps = 0

    def step(self) -> None:
        """Changes the parameters by the gradients of the last backward.

        Raises:
            RuntimeError: there was no backward yet.
        """
        parameters, gradients = self.layer.parameters(), self.layer.gradients()
        self.steps += 1
        beta_1, beta_2 = self.betas
        for name, gradient in gradients.items():
            mean, square = self.means[name], self.squares[name]
            mean += (1 - beta_1) * (gradient - mean)
            square += (1 - beta_2) * (gradient.astype(square.dtype) ** 2 - square)
            corrected = mean / (1 - beta_1**self.steps)
            size = np.sqrt(square / (1 - beta_2**self.steps))
            parameters[name] -= self.lr * corrected / (size + self.eps)


class SGD:
    """Gradient descent with momentum: u ← μ u + g, then θ ← θ - η u.

    Args:
        layer: whose parameters are changed, in place, after each of its backwards.
        lr: the learning rate η.
        momentum: μ in [0, 1); 0 is gradient descent.

    Attributes:
        lr: may be changed between steps.

    Raises:
        ValueError: lr or momentum outside its range.

    Source: chapter 12, eq-gradient-descent, eq-momentum; Polyak (1964).
    """

    def __init__(self, layer: Layer, lr: float = 1e-3, momentum: float = 0.0) -> None:
        self.layer, self.lr = layer, require_rate("lr", lr)
        self.momentum = require_rate("momentum", momentum, below=1.0)
        self.velocities = zeros_like_parameters(layer)

    def step(self) -> None:
        """Changes the parameters by the gradients of the last backward.

        Raises:
            RuntimeError: there was no backward yet.
        """
        parameters = self.layer.parameters()
        for name, gradient in self.layer.gradients().items():
            velocity = self.velocities[name]
            velocity *= self.momentum
            velocity += gradient
            parameters[name] -= self.lr * velocity
