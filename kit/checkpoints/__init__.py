"""Inspect checkpoints, time loading and saving, and plan how often to save."""

from kit.callable_room import make_callable

make_callable(__name__)
