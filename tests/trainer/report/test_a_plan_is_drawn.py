"""The pictures of `rlhf plan --svg`: the timeline of a predicted step to scale, and who waits in it."""

from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from rlhf_mapper.mapping import DeviceMapping
from rlhf_planning.timeline import Timeline, timeline_of
from rlhf_trainer.report.plan_pictures import STYLE, timeline_figure, timeline_svg
from tests.mapper.example_mappings import COLOCATED, LAPTOP, SPLIT

SVG = "{http://www.w3.org/2000/svg}"
each_mapping = pytest.mark.parametrize("mapping", [COLOCATED, SPLIT, LAPTOP], ids=["colocated", "split", "laptop"])


def timeline(mapping: DeviceMapping) -> Timeline:
    assert mapping.prediction
    return timeline_of(mapping.pools, mapping.prediction)


def figure_of(mapping: DeviceMapping) -> tuple[Figure, dict[str, str]]:
    with mpl.rc_context(STYLE):
        return timeline_figure(timeline(mapping), title="job")


@each_mapping
def test_the_drawing_is_xml_that_names_everything(mapping: DeviceMapping) -> None:
    drawn = timeline(mapping)
    root = ET.fromstring(timeline_svg(drawn, title='<job> & "co" for $1 or $2'))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert '<job> & "co" for $1 or $2' in texts
    assert {name for row in drawn.rows for name in row} <= set(texts)
    hovers = {str(title.text).split(":")[0] for title in root.iter(f"{SVG}title")}
    assert hovers == {f"{bar.model} {bar.phase}" for bar in drawn.bars}


@each_mapping
def test_bars_stand_where_the_axis_says(mapping: DeviceMapping) -> None:
    figure, hovers = figure_of(mapping)
    drawn = timeline(mapping)
    places = {
        hovers[str(patch.get_gid())].split(":")[0]: (patch.get_x(), patch.get_x() + patch.get_width())
        for axes in figure.axes
        for patch in axes.patches
        if isinstance(patch, mpl.patches.Rectangle) and patch.get_gid()
    }
    assert len(places) == len(drawn.bars)
    for bar in drawn.bars:
        start, end = places[f"{bar.model} {bar.phase}"]
        assert start == pytest.approx(bar.start)
        assert end == pytest.approx(bar.end, abs=drawn.seconds / 500), "a short one is a point wide"
    assert all(axes.get_xlim() == pytest.approx((0, drawn.seconds)) for axes in figure.axes)


def test_a_pool_that_waits_is_hatched_for_that_time() -> None:
    figure, _ = figure_of(SPLIT)
    spans = {
        axes.get_ylabel(): [
            (patch.get_x(), patch.get_x() + patch.get_width())
            for axes_patch in [axes.patches]
            for patch in axes_patch
            if isinstance(patch, mpl.patches.Rectangle) and patch.get_hatch()
        ]
        for axes in figure.axes
    }
    assert spans == {pool: [pytest.approx(gap) for gap in timeline(SPLIT).idle(pool)] for pool in spans}
    assert spans["reference"]
    assert not any(patch.get_hatch() for axes in figure_of(COLOCATED)[0].axes for patch in axes.patches)


def test_stages_are_named_with_their_times() -> None:
    title = figure_of(LAPTOP)[0].axes[0].get_title(loc="left")
    assert len(timeline(LAPTOP).stages) == 3
    assert all(f"{stage} " in title for stage in timeline(LAPTOP).stages)
