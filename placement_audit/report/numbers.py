"""What real ranks measured, a line for each kind of numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from placement_audit.measurement import Measurement
from placement_audit.report.words import labelled, plural
from placement_audit.rules.departures import in_words
from placement_audit.verdicts import Report
from placement_audit.weigh import slots


def measured_lines(report: Report, width: int) -> Iterator[Text]:
    """The measurement as a section of the report; nothing where none was made."""
    if report.measurement is None:
        return
    yield Text()
    for label, text in measured_items(report):
        yield from map(Text, labelled(label, text, width=width, indent=0))


def measured_items(report: Report) -> Iterator[tuple[str, str]]:
    """(what, its numbers in words); nothing where nothing was measured."""
    m = report.measurement
    if m is None:
        return
    for label, text in (
        ("measured", _gradients(m)),
        ("loss", f"{m.loss:.7g}, {m.reference_loss:.7g} on one device: relative error {m.loss_error:.1e}"),
        ("step", _steps(m)),
        ("activations", _activations(m)),
        ("departures", _departures(m)),
        ("states", _states(report, m)),
        ("readers", _readers(m)),
    ):
        if text:
            yield label, text


def _gradients(m: Measurement) -> str:
    there = [(p, p.grad_error) for p in m.params if p.grad_error is not None]
    errors = [e for p, e in there if m.telling(p)]
    right = sum(e <= m.tolerance for e in errors)
    how = f"{m.dtype}, seed {m.seed}" + (f", {m.model}" if m.model else "")
    text = f"{right:,} of {plural(len(errors), 'gradient')} within {m.tolerance:.0e} of one device's ({how})"
    if errors:
        text += f"; the worst is off by {max(errors):.1e}"
    if loose := sum(m.tolerance < e <= m.allowed(p) for p, e in there if m.telling(p)):
        text += f"; {loose:,} more within ten times what rounding moves them"
    if len(there) > len(errors):
        text += f"; {len(there) - len(errors):,} not compared, zero but for rounding"
    if m.grad_scale != 1:
        text += f"; all are {m.grad_scale} of it: the data-parallel ranks' parts are averaged"
    return text


def _steps(m: Measurement) -> str:
    job = [p.step_error for p in m.params if p.step_error is not None and m.telling(p)]
    sgd = [p.sgd_error for p in m.params if p.sgd_error is not None and m.telling(p)]
    parts = []
    if job:
        parts.append(f"after clipping and one step of the job's optimizer off by {max(job):.1e} at most")
    if sgd:
        parts.append(f"changes by plain SGD by {max(sgd):.1e}")
    if m.grad_norm is not None and m.reference_grad_norm is not None:
        parts.append(f"total norm {m.grad_norm:.6g}, {m.reference_grad_norm:.6g} on one device")
    return "; ".join(parts)


def _activations(m: Measurement) -> str:
    """Outputs of modules against one device."""
    if not m.activations:
        return ""
    parts = []
    for what, errors in (
        ("value", [a.value_error for a in m.activations if a.value_error is not None]),
        ("gradient", [a.grad_error for a in m.activations if a.grad_error is not None]),
    ):
        if errors:
            right = sum(e <= m.tolerance for e in errors)
            parts.append(
                f"{right:,} of {plural(len(errors), what)} right, the worst off by {max(errors):.1e}"
            )
    skipped = sum(a.value_error is None or a.grad_error is None for a in m.activations)
    text = f"what {plural(len(m.activations), 'call')} of modules put out, against one device: "
    text += "; ".join(parts) if parts else "nothing could be compared"
    return text + (f"; not compared in full: {skipped:,}" if skipped else "")


def _departures(m: Measurement) -> str:
    """The first place where numbers part from one device's."""
    if not m.departures:
        return ""
    d = m.departures[0]
    text = in_words(d)
    if d.steps:
        text += f"; {d.steps[0].role} in {d.steps[0].call_site.path}:{d.steps[0].call_site.line}"
    rest = len(m.departures) - 1
    return text + (f"; {rest:,} more such places" if rest > 1 else "; one more such place" if rest else "")


def _states(report: Report, m: Measurement) -> str:
    compared, cautious, wrong = slots(report.trace, m)
    if not compared:
        return ""
    text = f"{compared:,} traced states at boundaries set against the ranks' values: "
    text += "all agree" if not wrong else f"{wrong:,} contradict them"
    return text + (f", {cautious:,} of them equal though traced as varying" if cautious else "")


def _readers(m: Measurement) -> str:
    """Who reads the gradients that are left Partial."""
    if not m.readers:
        return ""
    parts = []
    for r in m.readers:
        place = r.user_site if r.user_site.line else r.call_site
        what = f"{r.through} in {r.call_site.function} (from {place.path}:{place.line})"
        parts.append(what if r.whole else what + ", ONE RANK'S TERM ONLY")
    count = len({fqn for r in m.readers for fqn in r.params})
    return f"{plural(count, 'gradient')} left Partial {'is' if count == 1 else 'are'} read by " + "; ".join(
        parts
    )
