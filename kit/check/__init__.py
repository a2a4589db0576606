"""Survey the machines of a cluster and measure their links."""

from kit.callable_room import make_callable

make_callable(__name__)
