"""Files of figures."""

import io

from mf_aggregators import figures


def test_a_figure_is_the_same_bytes_again() -> None:
    files = []
    for _ in range(2):
        figure, ((axes,),) = figures.panels(1, 1, (4.0, 3.0))
        figures.lines(axes, {"a": ([1, 2], [1, 2])}, title="same")
        file = io.BytesIO()
        figures.save(figure, file)
        files.append(file.getvalue())
    assert files[0] == files[1]
    assert files[0].startswith(b"\x89PNG")
