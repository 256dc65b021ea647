"""The command line: ``leanconv doctor | bench | filter | explain | precompile | tune | cache | demo``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

import leanconv
from leanconv.cli import command_line
from leanconv.cli.command_line import FAILED, INTERRUPTED
from leanconv.images.borders import BORDERS

_BORDERS = ", ".join(BORDERS)

app = command_line.new_app(
    "leanconv", "Convolution on NVIDIA GPUs without the workspace, and on NumPy without a GPU.", completion=True
)


class Action(str, Enum):
    """What to do with the cache."""

    show = "show"
    path = "path"
    size = "size"
    clear = "clear"
    bundle = "bundle"


def _bytes(text: str | None) -> int | None:
    from leanconv.runtime import env

    return None if text is None else env.parse_bytes("--workspace-limit", text)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"leanconv {leanconv.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Say what is installed, what works here, and what to do about what does not.

    Exits with 1 if something is broken. A missing GPU or library is not broken.
    """
    if as_json:
        import json

        from leanconv.cli.doctor import report

        found = report()
        print(json.dumps(found, indent=2))
        if not found["ok"]:
            raise typer.Exit(FAILED)
        return
    from rich.table import Table
    from rich.text import Text

    from leanconv.bench.tables import console
    from leanconv.cli import doctor as findings

    out = console()
    table = Table(title="installed", title_justify="left", show_header=False)
    for name, version in findings.installed():
        table.add_row(name, Text(version))
    out.print(table)
    words = {"ok": ("yes", "green"), "absent": ("no", "yellow"), "broken": ("BROKEN", "bold red")}
    table = Table("what", "works", "", title="working", title_justify="left", show_lines=True)
    broken = False
    for finding in findings.examine():
        word, style = words[finding.state]
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\n→ {finding.advice}", "bold")
        table.add_row(finding.name, Text(word, style), text)
        broken |= finding.state == "broken"
    out.print(table)
    if broken:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    what: command_line.What,
    layout: command_line.Layout = None,
    precision: command_line.Precision = None,
    dtype: command_line.Dtype = None,
    op: command_line.Operation = None,
    only: command_line.Only = None,
    engines: Annotated[
        str, typer.Option(help="Patterns between commas: 'leanconv*,torch-*,cudnn*'; compile-* only so.")
    ] = "",
    algorithms: Annotated[
        str, typer.Option(help="Patterns of leanconv's own algorithms; by default those that the suite is about.")
    ] = "",
    batch: command_line.Batch = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default the GPU where there is one.")] = None,
    quick: command_line.Quick = False,
    sustained: Annotated[
        bool, typer.Option("--sustained", help="Also measure engines on a card that has been at work.")
    ] = False,
    seconds: command_line.Seconds = None,
    resume: command_line.Resume = None,
    full: Annotated[bool, typer.Option("--full", help="Print every engine's row.")] = False,
    out: command_line.Out = None,
    plot: command_line.Plot = None,
    revision: command_line.Revision = None,
    workspace_limit: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help=f"{command_line.LIMIT} leanconv's others are left out, peers are not."),
    ] = None,
) -> None:
    """Measure leanconv and every peer that is installed, print a table and write a results file.

    Suites: im2win, opencnn, winograd1d, … (a wrong name lists them). A problem in words:
    conv:n8,c64,h56,k64,r3,pad1 or filter:2048x2048,7x7. A results file (.json) is printed, and nothing measured.
    """
    from leanconv.bench import Results, default_path, plots, run_suite, show
    from leanconv.runtime.files import check_writable

    if plot:
        plots.refuse_format(plot)
    if what.endswith(".json"):
        return show(Results.read(Path(what)), full or None)
    for path in (out or Path("benchmarks/results/results.json"), plot):
        if path:
            check_writable(path)
    results = run_suite(
        what, layout=layout, precision=precision, dtype=dtype, op=op, engines=command_line.patterns(engines),
        only=only, batch=batch, quick=quick, sustained=sustained, device=device, revision=revision,
        workspace_limit=_bytes(workspace_limit),
        algorithms=command_line.patterns(algorithms), seconds=seconds, resume=Results.read(resume) if resume else None,
    )  # fmt: skip
    path = out or default_path(results, bool(engines or algorithms or only or batch or quick or workspace_limit))
    results.write(path)
    show(results, full or None)
    print(f"results: {path}")
    if plot and results.rows:
        plots.plot(results, plot)
        print(f"plot: {plot}")
    if results.interrupted:
        raise typer.Exit(INTERRUPTED)
    if results.own_failed or not results.rows:
        raise typer.Exit(FAILED)


@app.command("filter")
def filter_files(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="IN",
            parser=command_line.some_path,
            help="A picture (PNG, JPEG, TIFF, …), a .npy file of shape (…, height, width) or (height, width, 3 or 4), "
            "several of them, or a folder of them.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            parser=command_line.some_path,
            help="A file, whose suffix names the format (.npy for numbers); or a folder, which is made if need be.",
        ),
    ],
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            "-k",
            help="gaussian:SIZE[:SIGMA], box:SIZE, sobel-x, sobel-y, laplacian, sharpen, emboss, or FILE.npy.",
        ),
    ],
    border: Annotated[
        str, typer.Option(help=f"One of {_BORDERS}, or a name or number of SciPy's or OpenCV's.")
    ] = "reflect101",
    value: Annotated[float, typer.Option(help="The constant border's pixel, one that the picture can hold.")] = 0,
    delta: Annotated[float, typer.Option(help="Added to every pixel; 128 shows both signs of a sobel.")] = 0,
    absolute: Annotated[bool, typer.Option("--absolute", help="Take absolute values, before adding delta.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu, the default.")] = None,
    max_pixels: Annotated[
        int | None,
        typer.Option(min=0, help="Refuse pictures of more pixels; 0 takes all. By default Pillow's limit, 178956970."),
    ] = None,
) -> None:
    """Filter pictures, channel by channel, or arrays.

    The result keeps the input's bits a channel, 8 at least, grey or RGB, transparency and ICC profile. Palettes, CMYK,
    YCbCr and Lab become RGB, CMYK without its profile, which is of inks. Integers are rounded, halves to the even one,
    and saturate. Transparency is not filtered. The pixels are turned as the Exif orientation says; other Exif data are
    not kept.

    A folder or several files go into the folder OUT, under their own names. A file that fails is named, the next one
    follows, and the exit code is 1. Folders inside a folder are not entered.

    An array of 3 axes, the last of length 3 or 4, is a picture with its channels last, a fourth being transparency. Any
    other array is filtered along its last two axes. A picture that is written to a .npy file has its channels last.

    The extra "pictures" installs what reads all of these: Pillow, and for more than 8 bits tifffile and imagecodecs.
    """
    from leanconv.cli import filter as work

    wanted = work.settings(kernel, border, value, delta, absolute, device, max_pixels)
    try:
        if not work.run(sources, target, wanted):
            raise typer.Exit(FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def explain(
    problem: Annotated[
        str, typer.Argument(metavar="PROBLEM", help="conv:n8,c64,h56,k64,r3,pad1 or filter:480x640,7x7.")
    ],
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:N or cpu; by default the GPU, if there is one.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="An algorithm's name, to hear whether it can.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the kernels, without a GPU an H200's.")] = False,
    workspace_limit: command_line.Limit = None,
) -> None:
    """Say which algorithm would run for a problem, why, and why not the others.

    A layer is conv: and its sizes, in any order: n, c, h, w, k, r, s (w and s are as h and r where absent), of
    volumes d slices and filters of t; stride, pad, dil, groups; a layout, a precision level, a type; relu, bias; dgrad
    or wgrad for a gradient.
    """
    from leanconv.bench import parse_problem
    from leanconv.runtime.launch import why_no_gpu

    parsed = parse_problem(problem)
    if device is None:
        device = "cpu" if why_no_gpu() and not compile else "cuda"
    if compile and device == "cpu":
        raise ValueError("--compile is for a GPU, and --device is cpu: leave one out")
    limit = _bytes(workspace_limit)
    print(leanconv.explain(parsed, device=device, algorithm=algorithm, compile=compile, workspace_limit=limit))


@app.command("precompile")
def compile_kernels(
    what: command_line.Work,
    layout: command_line.Layout = None,
    precision: command_line.Precision = None,
    dtype: command_line.Dtype = None,
    op: command_line.Operation = None,
    batch: command_line.Batch = None,
    inputs: command_line.Inputs = None,
    backward: command_line.Backward = None,
    device: command_line.Gpu = "cuda",
    algorithm: Annotated[
        str, typer.Option(help="An algorithm's name; by default the one that a call chooses.")
    ] = "auto",
    workspace_limit: command_line.Limit = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", metavar="FILE", help="Put them in this file, for LEANCONV_BUNDLE; what is there stays."
        ),
    ] = None,
) -> None:
    """Compile the kernels of a suite, a problem or a model on all cores, into the folder of compiled kernels.

    With --bundle they go into a file for machines that have no compiler. Without a GPU that is one for an H200.
    """
    from leanconv.cli import tune as tuner

    given = (layout, precision, dtype, op, batch, inputs or (), backward, _bytes(workspace_limit))
    for limit, problems in tuner.work_of(what, *given).items():
        done = leanconv.precompile(problems, device=device, algorithm=algorithm, workspace_limit=limit, bundle=bundle)
        print(done if limit is None else f"{done} (workspace_limit {limit})")


@app.command()
def tune(
    what: command_line.SomeWork = None,
    layout: command_line.Layout = None,
    precision: command_line.Precision = None,
    dtype: command_line.Dtype = None,
    op: command_line.Operation = None,
    batch: command_line.Batch = None,
    inputs: command_line.Inputs = None,
    backward: command_line.Backward = None,
    device: command_line.Gpu = "cuda",
    mode: Annotated[str | None, typer.Option(help="on, read-only or frozen, in place of LEANCONV_TUNING.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Time anew what the table has.")] = False,
    peers: Annotated[
        bool | None, typer.Option("--peers/--no-peers", help="Time PyTorch too; by default where it is installed.")
    ] = None,
    seconds: command_line.Seconds = None,
    show: Annotated[bool, typer.Option("--show", help="Print the tables.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the tables: kernels, and on a GPU values.")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Tune anew what tables have for kernels that have changed.")
    ] = False,
    export: Annotated[Path | None, typer.Option("--export", metavar="FILE", help="Copy your table.")] = None,
    import_: Annotated[Path | None, typer.Option("--import", metavar="FILE", help="Merge a table into yours.")] = None,
    workspace_limit: command_line.Limit = None,
) -> None:
    """Time what could compute each problem on this GPU, and keep the times: auto takes the quickest from then on."""
    from importlib.util import find_spec

    from leanconv.cli import tune as tuner

    actions = [show, verify, refresh, export is not None, import_ is not None]
    if sum((what is not None, *actions)) != 1:
        raise ValueError("give one thing to tune, or one of --show, --verify, --refresh, --export and --import")
    if what is not None or refresh:
        given = (layout, precision, dtype, op, batch, inputs or (), backward)
        work = tuner.outdated(device) if what is None else tuner.work_of(what, *given, _bytes(workspace_limit))
        timed = find_spec("torch") is not None if peers is None else peers
        tuner.run(work, device, mode, again, timed, seconds)
    elif show:
        tuner.show()
    elif verify:
        if not tuner.check(device):
            raise typer.Exit(FAILED)
    elif export is not None:
        tuner.export_table(export)
    elif import_ is not None:
        tuner.import_table(import_)


@app.command()
def cache(
    action: Annotated[Action, typer.Argument(help="show (path and size), path, size, clear or bundle.")] = Action.show,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The file of a bundle.")] = None,
) -> None:
    """Show or empty the folder of compiled kernels, or put all of it in a bundle: what a program compiled there."""
    from leanconv.runtime import cache as store
    from leanconv.runtime import env

    if (action is Action.bundle) != (file is not None):
        raise ValueError("give leanconv cache bundle, and it alone, a file to write")
    if file is not None:
        from leanconv.call.precompile import bundle_of_folder

        print(f"{file} has {bundle_of_folder(file)}")
        return
    base = env.cache_dir()
    folder = "no folder, as this user has no home; set LEANCONV_CACHE_DIR" if base is None else base / "kernels"
    if action is Action.path:
        if base is None:
            raise ValueError(f"kernels are kept in {folder}")
        print(folder)
        return
    count, total = store.clear() if action is Action.clear else store.size()
    text = f"{count} kernels, {total / 1e6:.1f} MB"
    if action is Action.clear:
        print(f"removed {text} from {folder}")
    else:
        print(text if action is Action.size else f"{text} in {folder}")
    if env.cache_disabled():
        print("LEANCONV_NO_CACHE is set: nothing is read from there or written to it")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo-output"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer layers, rougher figures.")] = False,
) -> None:
    """Filter a photograph, run real layers with every algorithm that can run here, check all of it, draw pictures."""
    from leanconv.cli.demo import run

    if not run(out, quick=quick):
        raise typer.Exit(FAILED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 where something of leanconv's own failed, 2 for a mistake in the command."""
    command_line.run(app, "leanconv", arguments)


if __name__ == "__main__":
    main()
