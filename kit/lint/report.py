"""The linter's report: each finding with the line of the script that it is about."""

import html

from kit.lint.lint import Finding

COLOURS = {"error": "#dc2626", "warning": "#d97706", "info": "#64748b"}


def beside(text: str, found: list[Finding]) -> dict[str, str]:
    """The findings with the lines that they are about, as plain text and HTML; lines with a secret are not shown."""
    hidden = {f.line for f in found if f.rule in ("KS601", "KS602")}
    rows = ["" if number in hidden else row for number, row in enumerate(["", *text.split("\n"), ""])]
    plain, table = "", '<table style="font-family:system-ui;text-align:left">'
    for f in found:
        said = f"{f.message} {f.fix}"
        plain += f"{f.line}: {rows[f.line]}\n    {f.severity} {f.rule}: {said}\n"
        row, kind = html.escape(rows[f.line]), f'<b style="color:{COLOURS[f.severity]}">{f.severity} {f.rule}</b>'
        table += f"<tr><td>{f.line}</td><td><code>{row}</code></td><td>{kind} {html.escape(said)}</td></tr>"
    return {"text/plain": plain, "text/html": f"{table}</table>"}
