"""Read metrics and show runs while they train."""

from kit.callable_room import make_callable

make_callable(__name__)
