"""Counts the faults that tests of a module play, and prints tried, held and failed at its end."""

from contextlib import contextmanager

import pytest


class Played:
    """Whether each fault was held, by its name."""

    def __init__(self):
        self.held = {}

    @contextmanager
    def fault(self, name):
        """Counts a fault: nothing in the block fails where it was held."""
        self.held[name] = False
        yield
        self.held[name] = True

    def print_at_end(self, title):
        """A fixture of the module that prints the numbers, and the names of what failed."""

        @pytest.fixture(scope="module", autouse=True)
        def counted(request):
            yield
            failed = [name for name, held in self.held.items() if not held]
            text = f"{title}: {len(self.held)} tried, {len(self.held) - len(failed)} held, {len(failed)} failed"
            with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                print("\n" + ": ".join([text, *failed]))

        return counted
