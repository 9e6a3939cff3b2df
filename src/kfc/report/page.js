"use strict";
// Draws the figures from the page's data, and redraws them as the controls say.
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const controls = document.getElementById("controls");
  const variantChoice = document.getElementById("variant");
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true,
    displaylogo: false,
    // All that there are: some versions of plotly offer to upload a figure by default.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    plotlyServerURL: "",
  };

  const chosen = (name) => controls.querySelector(`input[name="${name}"]:checked`)?.value;

  function draw(id, traces, layout, size) {
    if (size) layout.width = size.width;
    if (size && !layout.height) layout.height = size.height;
    // A finger that scrolls the page must not zoom.
    if (touch) layout.dragmode = false;
    spreadLabels(layout.xaxis, traces.flatMap((trace) => trace.x));
    spreadLabels(layout.yaxis, traces.flatMap((trace) => trace.y));
    Plotly.react(id, traces, layout, config);
  }

  function smallestPositive(values) {
    return values.filter((value) => value > 0).reduce((a, b) => Math.min(a, b), Infinity);
  }

  // Left to itself, plotly labels all of 2 to 9 over a few decades, on top of each other.
  function spreadLabels(axis, values) {
    if (axis.type !== "log") return;
    const highest = values.reduce((a, b) => Math.max(a, b), 0);
    const decades = Math.log10(highest / smallestPositive(values));
    if (decades === 0 || (decades > 0.7 && decades < 3)) axis.dtick = "D2";
  }

  // Figures that are drawn as they stand. Plotly writes into what it is given: copies only.

  function drawFigure({ id, layout, variants }, size) {
    const variant = variants.length > 1 ? Number(variantChoice.value) : 0;
    draw(id, structuredClone(variants[variant]), structuredClone(layout), size);
  }

  // Curves

  function shownCurves() {
    const parameters = chosen("parameters");
    const kinds = parameters === "both" ? ["raw", "averaged"] : [parameters];
    const leaders = new Set(
      [...controls.querySelectorAll('input[name="run"]:checked')].map((box) => Number(box.value)),
    );
    const others = controls.querySelector('input[name="others"]')?.checked;
    return page.curves.runs
      .filter((run) => leaders.has(run.leader) && (run.best || others))
      .sort((one, other) => one.best - other.best)
      .flatMap((run) => kinds.map((kind) => ({ run, kind })));
  }

  function curveTrace({ run, kind }, measure, floor) {
    const { colour, dash, marker } = run.style;
    const axis = chosen("axis");
    const values = run[kind][measure];
    const faint = kind === "raw" && chosen("parameters") === "both";
    return {
      type: "scatter",
      mode: run.best && !faint ? "lines+markers" : "lines",
      name: kind === "raw" ? `${run.label} (raw)` : run.label,
      // At 0, a logarithmic axis would draw a line from infinitely far away.
      x: run.x[axis].map((value) => (value === 0 && chosen("scale-x") === "log" ? null : value)),
      y: values.map((value) => (value === null ? null : Math.max(value, floor))),
      customdata: values,
      opacity: run.best ? (faint ? 0.6 : 1) : 0.35,
      line: { color: colour, dash, width: run.best && !faint ? 2 : 1.2 },
      marker: { color: colour, symbol: marker, size: 7, maxdisplayed: 12 },
      hovertemplate: `%{customdata:.4~g} at %{x:.4~g} ${page.curves.axes[axis]}`,
    };
  }

  function lowestDrawn(curves, measure) {
    if (chosen("scale-y") === "linear") return 0;
    const values = curves.flatMap(({ run, kind }) => run[kind][measure]);
    const smallest = smallestPositive(values);
    return Number.isFinite(smallest) ? smallest / 2 : 1;
  }

  function drawCurves({ id, layout }, measure, size) {
    const curves = shownCurves();
    const floor = lowestDrawn(curves, measure);
    const traces = curves.map((curve) => curveTrace(curve, measure, floor));
    const shape = structuredClone(layout);
    shape.xaxis.title.text = page.curves.axes[chosen("axis")];
    shape.xaxis.type = chosen("scale-x");
    shape.yaxis.type = chosen("scale-y");
    // A run of a single evaluation still shows which line it is.
    for (const trace of traces) if (trace.x.length === 1) trace.mode = "markers";
    draw(id, traces, shape, size);
  }

  // All of them

  function drawAll(only = () => true, fixedSize = false) {
    for (const figure of page.figures.filter(only)) {
      const measure = page.curves?.measures.find((name) => figure.id === `curve-${name}`);
      const size = fixedSize ? sizeOf(document.getElementById(figure.id)) : undefined;
      if (measure) drawCurves(figure, measure, size);
      else drawFigure(figure, size);
    }
  }

  function sizeOf({ clientWidth, clientHeight }) {
    return { width: clientWidth, height: clientHeight };
  }

  drawAll();
  // Only pages with curves have controls for them.
  controls?.addEventListener("change", () => drawAll((figure) => figure.id.startsWith("curve-")));
  variantChoice?.addEventListener("change", () => drawAll((figure) => figure.variants.length > 1));
  // Paper is narrower than most windows, and nothing is laid out again while it is printed.
  addEventListener("beforeprint", () => {
    document.body.classList.add("printing");
    drawAll(undefined, true);
  });
  addEventListener("afterprint", () => {
    document.body.classList.remove("printing");
    drawAll();
    for (const { id } of page.figures) Plotly.Plots.resize(id);
  });
})();
