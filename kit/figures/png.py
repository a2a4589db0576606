"""Static pictures for front ends that neither run scripts nor accept SVG, such as code hosts: an SVG drawn as PNG."""

import base64
import io
import subprocess
import sys
from functools import cache
from html import escape
from typing import Any

# resvg takes "sans-serif" for Arial and draws no text without it. These are on most machines.
FONTS = "DejaVu Sans, Liberation Sans, Noto Sans, Arial, Helvetica"
GENERIC = 'font-family="sans-serif"'
SAMPLE = f'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20"><text y="15" {GENERIC}>kit</text></svg>'
PNG, SVG = "image/png", "image/svg+xml"


def static_picture(svg: str, width: int, in_child: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """MIME data and metadata of an SVG that is shown `width` pixels wide: a PNG, as untrusted notebooks show no SVG.

    It has as many pixels as the SVG: plotly's renderer in JupyterLab shows the PNG in its natural size until the mouse
    enters it, and the live figure from then on. Where this machine cannot draw one, for want of resvg-py
    or of a font, it is the SVG. `in_child`: drawn by another process, as resvg keeps the interpreter's lock: a picture
    of 64 GPUs would stop the cells of a notebook for 0.3 s.
    """
    picture = (_draw_in_child(svg) if in_child else draw(svg)) if can_draw_text() else b""
    if not picture:
        return {SVG: svg}, {}
    return {PNG: base64.b64encode(picture).decode()}, {PNG: {"width": width}}


def _draw_in_child(svg: str) -> bytes:
    """The PNG, or nothing where the process failed, as on a machine without free memory."""
    command = [sys.executable, "-P", __file__]  # as a file: the child needs no other module of this package
    try:
        return subprocess.run(command, input=svg.encode(), capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


def img(svg: str, title: str) -> str:
    """An HTML <img> with the SVG as data, which an untrusted notebook shows; nothing in it runs."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(title)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}"/>'


def draw(svg: str) -> bytes:
    """The SVG as PNG of 256 colours, with a clear background where it has none."""
    import resvg_py
    from PIL import Image

    drawn = bytes(resvg_py.svg_to_bytes(svg_string=svg.replace(GENERIC, f'font-family="{FONTS}"')))
    small = io.BytesIO()
    with Image.open(io.BytesIO(drawn)) as image:
        image.quantize(256, Image.Quantize.FASTOCTREE).save(small, "PNG", optimize=True)
    return small.getvalue()


@cache
def can_draw_text() -> bool:
    """Whether resvg-py is installed and finds a font."""
    try:
        return draw(SAMPLE) != draw(SAMPLE.replace("kit", ""))
    except ImportError:
        return False


if __name__ == "__main__":
    sys.stdout.buffer.write(draw(sys.stdin.buffer.read().decode()))
