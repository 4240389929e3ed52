"""Where models come from: names to checkpoints, checked before they are loaded."""

from nanofw.weights.source import ModelSource, resolve

__all__ = ["ModelSource", "resolve"]
