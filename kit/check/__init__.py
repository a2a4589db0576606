"""Survey the machines of a cluster, measure them, and fill cluster profiles."""

from kit.callable_room import make_callable

make_callable(__name__)
