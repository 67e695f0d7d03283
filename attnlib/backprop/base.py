# Made from book/10_backward_attention.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""What every layer with a backward by hand shares.

Derived in chapter 10, "Backward through attention" (book/10_backward_attention.ipynb).
"""

from typing import Any

import numpy as np

from attnlib.backprop.checks import require_floating


class Layer:
    """A function with parameters, whose forward remembers what its backward needs.

    A subclass writes `forward`, which ends with `remember`, and `backward(d_output)`, which
    begins with `recall`. A public attribute that is an array is a parameter, and one that
    is a `Layer` is a part, whose parameters belong to the whole. A layer with parameters of
    its own sets their gradients in `backward`, as the dict `_gradients`.

    Inputs are kept, not copied: leave them unchanged between forward and backward. Only
    those of the last forward are, so a layer that is used twice in one network is refused
    at the second backward: its first use would get the gradients of its last.

    Attributes:
        training: whether dropout acts; True at the start, see `train` and `eval`.

    Source: chapter 10, the contract of a layer.
    """

    training: bool = True
    _cache: dict[str, Any] | None = None
    _gradients: dict[str, np.ndarray] | None = None
    _recalled: bool = True  # whether a backward has come since the last forward
    _replaced: bool = False  # whether that forward took the place of one without backward

    def remember(self, output: np.ndarray | np.inexact, **cache: Any) -> None:
        """Keeps what backward will need, in place of what an earlier forward kept.

        Args:
            output: the result of forward, whose shape and dtype d_output must have; a loss
                may be a single number.
            cache: arrays, or anything else, by name.
        """
        self._expected = np.shape(output), np.result_type(output)
        self._cache = cache
        self._recalled, self._replaced = False, not self._recalled

    def recall(self, d_output: np.ndarray | None = None) -> dict[str, Any]:
        """What the last forward has kept; backward reads it and must not write to it.

        Args:
            d_output: the gradient that backward was given; may be left out where the
                output is a single number, a loss.

        Raises:
            RuntimeError: there was no forward yet; or a second backward comes after two
                forwards, of which only the last is kept.
            TypeError: d_output is not floating point, or not of the dtype of the output.
            ValueError: d_output has not the shape of the output.
        """
        if self._cache is None:
            raise RuntimeError(f"{type(self).__name__}: call forward before backward")
        if self._recalled and self._replaced:
            raise RuntimeError(
                f"{type(self).__name__}: expected one backward after several forwards, "
                "since only the last is kept; a layer that is used twice needs a forward "
                "before each backward, or a copy for each use"
            )
        shape, dtype = self._expected
        if d_output is not None or shape != ():
            require_floating("d_output", d_output, dtype)
            if d_output.shape != shape:
                expected = f"expected shape {shape} as the output"
                raise ValueError(f"d_output: {expected}, got {d_output.shape}")
        self._recalled = True
        return self._cache

    def parts(self) -> dict[str, "Layer"]:
        """The layers that this one is made of, by name."""
        return {name: x for name, x in self._public() if isinstance(x, Layer)}

    def parameters(self) -> dict[str, np.ndarray]:
        """The arrays that are learned, by name: themselves, so that they can be updated."""
        found = {name: x for name, x in self._public() if isinstance(x, np.ndarray)}
        for part, layer in self.parts().items():
            found |= {f"{part}.{name}": array for name, array in layer.parameters().items()}
        return found

    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients that the last backward has found, with the keys of `parameters`.

        Raises:
            RuntimeError: there was no backward yet.
        """
        found = dict(self._gradients or {})
        for part, layer in self.parts().items():
            found |= {f"{part}.{name}": array for name, array in layer.gradients().items()}
        if missing := [name for name in self.parameters() if name not in found]:
            what = f"{type(self).__name__}: no gradient of {', '.join(missing)}"
            raise RuntimeError(f"{what}: call backward first")
        return {name: found[name] for name in self.parameters()}

    def train(self, mode: bool = True) -> "Layer":
        """Sets `training` here and in all parts; returns the layer."""
        self.training = mode
        for part in self.parts().values():
            part.train(mode)
        return self

    def eval(self) -> "Layer":
        """The same as `train(False)`."""
        return self.train(False)

    def forget(self) -> None:
        """Drops what forward has kept, here and in all parts."""
        self._cache, self._recalled = None, True
        for part in self.parts().values():
            part.forget()

    def cache_bytes(self) -> int:
        """Memory in bytes held between forward and backward, inputs included.

        An array that several parts keep, or keep views of, counts once.
        """
        return sum(self._held().values())

    def _public(self) -> list[tuple[str, Any]]:
        """The attributes whose names begin with no underscore."""
        return [(name, x) for name, x in vars(self).items() if name[0] != "_"]

    def _held(self) -> dict[int, int]:
        """Size in bytes of each array that the cache keeps alive, by its identity."""
        held = {}
        for array in (self._cache or {}).values():
            if isinstance(array, np.ndarray):
                while isinstance(array.base, np.ndarray):  # a view keeps the whole alive
                    array = array.base
                held[id(array)] = array.nbytes
        for part in self.parts().values():
            held |= part._held()
        return held


def cast(layer: Layer, dtype: Any) -> Layer:
    """The same layer, with its parameters and those of its parts converted to a dtype.

    The arrays are new ones: make an optimizer afterwards. What a forward has kept, in the
    dtype of before, is forgotten.

    Args:
        layer: changed in place.
        dtype: such as `np.float32`.

    Source: chapter 10, the contract of a layer.
    """
    for name, array in vars(layer).items():
        if isinstance(array, np.ndarray):
            setattr(layer, name, array.astype(dtype))
    layer.forget()
    for part in layer.parts().values():
        cast(part, dtype)
    return layer
