"""Every colour of figures, tables and the board.

The first six and BAD are from the palette of Okabe and Ito (Color Universal Design, 2008), with grey for their
black, which vanishes in a dark theme, and without their yellow, which vanishes in a light one. The others are as far
from all of these as a search found. Any two differ by at least 15 (CIE76) in normal vision, under deuteranopia and
under protanopia; a test computes it.
"""

from kit.show import HTML_COLOURS

GOOD, BAD = HTML_COLOURS["good"], HTML_COLOURS["bad"]  # its green and its vermilion, which is only for what is bad
BLUE, ORANGE, GREEN, PINK, SKY, GREY = "#0072b2", "#e69f00", GOOD, "#cc79a7", "#56b4e9", "#666666"
VIOLET, LIME, OLIVE, PLUM, SALMON, CORNFLOWER = "#7766ff", "#88cc77", "#445522", "#773366", "#ff99aa", "#6699ff"
BROWN = "#bb7744"

COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, GREY)  # of lines without a fixed colour, in this order

# A quantity has the same colour in every figure.
COLOUR_OF = {
    "weights": BLUE, "gathered weights": SKY, "optimizer": GREEN, "gradients": ORANGE, "unsharded gradients": SALMON,
    "saved activations": GREY, "temporaries": PINK, "foreach temporaries": PLUM, "largest tensor": VIOLET,
    "workspace": LIME, "buckets": OLIVE, "dequantized weight": CORNFLOWER,
    "allocator rounding": BROWN,
    "train": BLUE, "eval": ORANGE, "save": GREEN, "load": GREY,
    "kept": GREEN, "trained on": BLUE, "evaluated": ORANGE, "context": GREY, "read": SKY, "write": ORANGE,
    "documents": BLUE, "all ranks": BLUE, "MFU": BLUE, "learning rate": BLUE, "gradient norm": BLUE,
    "utilisation": BLUE, "memory": GREEN, "power": ORANGE, "temperature": PINK,
}  # fmt: skip


def colour_of(name: str, index: int) -> str:
    """The colour of a quantity: fixed by its name where it is known, else by its place."""
    return COLOUR_OF.get(name) or COLOURS[index % len(COLOURS)]
