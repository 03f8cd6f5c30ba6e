"""Axes of plots: round numbers along them, where a value lies, and how it is written."""

import math

import numpy

LOG_RATIO = 50


class Scale:
    """Where values of a plot lie in its drawing.

    Args:
        box: left, right, top and bottom of what is between the axes.
        x, y: all values that are finite.
        log: a logarithmic scale, where the values ask for it.
        from_zero: the scale begins at zero.
        unit: of y; of "bytes" ticks are round in MiB or GiB.
    """

    def __init__(
        self,
        box: tuple[float, float, float, float],
        x: numpy.ndarray,
        y: numpy.ndarray,
        log: bool,
        from_zero: bool,
        unit: str,
    ) -> None:
        self.left, self.right, self.top, self.bottom = box
        self.x_low, self.x_high = float(x.min()), float(x.max())
        if self.x_low == self.x_high:
            self.x_low, self.x_high = self.x_low - 1, self.x_high + 1
        low, high = (min(0.0, float(y.min())) if from_zero else float(y.min())), float(y.max())
        self.log = log and low > 0 and high / low >= LOG_RATIO
        if self.log:
            low, high = math.log10(low), math.log10(high)
            self.y_ticks = _log_ticks(low, high)
        else:
            if low == high:
                low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
            self.y_ticks = ticks(low, high, 5, binary=unit == "bytes")
        room = (high - low) * 0.04
        self.low, self.high = low if from_zero and low == 0 else low - room, high + room
        self.y_ticks = [tick for tick in self.y_ticks if self.top - 1 <= self.y(tick) <= self.bottom + 1]
        self.x_ticks = [t for t in ticks(self.x_low, self.x_high, 6) if t == int(t)]

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def number(value: float, unit: str = "", digits: int = 3) -> str:
    """A number as short as it can be told: 1.5k, 2e-05, 3.2 GiB."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "bytes":
        power = next((p for p in (4, 3, 2, 1) if abs(value) >= 1024**p), 0)
        return f"{value / 1024**power:.{digits}g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if value else "0"
    if value and not 1e-3 <= abs(value) < 1e4:
        for power, letter in ((9, "G"), (6, "M"), (3, "k")):
            if 10**power <= abs(value) < 10 ** (power + 3):
                return f"{value / 10**power:.{digits}g}{letter}"
        return f"{value:.{digits}g}"
    return f"{int(value)}" if value == int(value) else f"{value:.{max(digits, 4)}g}"


def ticks(low: float, high: float, most: int, binary: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about `most`; of bytes, round in their unit."""
    base = 1024.0 ** math.floor(math.log(max(abs(high), 1), 1024)) if binary else 1.0
    rough = (high - low) / base / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999) * power
    first, last = math.ceil(low / base / step - 1e-9), math.floor(high / base / step + 1e-9)
    return [float(f"{n * step:.12g}") * base for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    skip = max(1, math.ceil((high - low) / 6))
    return [factor * 10.0**power for power in powers if power % skip == 0 for factor in factors]


def short_module(name: str) -> str:
    """The end of a module's name, by which people know it: layers.3, lm_head."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
