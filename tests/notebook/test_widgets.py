"""Controls above a picture, and the picture alone where there is no JupyterLab."""

from kit.notebook.widgets import explore


def test_a_picture_names_what_makes_it_impossible():
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    def draw(**values):
        raise ValueError("seq_len < 8")

    InteractiveShell.instance()
    with capture_output() as seen:
        explore(draw, {"seq_len": 4}, {"seq_len": (4, 8)})
    (out,) = seen.outputs
    assert "seq_len &lt; 8" in out.data["text/html"]
    assert out.data["text/plain"] == "seq_len = 4"
