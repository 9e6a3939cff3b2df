"use strict";
// Draws the figures from the data in the page, and redraws them when a control changes.
(() => {
  const read = (element) => JSON.parse(element.textContent);
  // The script element after each plot holds its layout and traces.
  const figures = [...document.querySelectorAll(".plot")].map((plot) => ({
    id: plot.id,
    ...read(plot.nextElementSibling),
  }));
  const controls = document.getElementById("controls");
  // Only the page about runs has training curves.
  const curves = controls && read(document.getElementById("curve-data"));
  const variantChoice = document.getElementById("variant");
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true,
    // On a phone the buttons would cover the lines.
    displayModeBar: touch || innerWidth < 800 ? false : "hover",
    displaylogo: false,
    // The complete list of buttons: some versions of plotly add one that uploads the figure.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    plotlyServerURL: "",
  };

  // The style of all figures, which their own layouts override.
  const ink = getComputedStyle(document.body).color;
  const axis = {
    automargin: true,
    zeroline: false,
    gridcolor: "#e3e3e3",
    showline: true,
    linecolor: ink,
    ticks: "outside",
    ticklen: 5,
    exponentformat: "power",
  };
  const template = {
    layout: {
      xaxis: axis,
      yaxis: axis,
      margin: { l: 56, r: 14, t: 14, b: 48 },
      showlegend: false,
      hovermode: "closest",
      hoverlabel: { namelength: -1, bgcolor: "#ffffff", font: { color: ink } },
      font: { family: "system-ui, sans-serif", size: 13, color: ink },
    },
  };

  const chosen = (name) => controls.querySelector(`input[name="${name}"]:checked`)?.value;

  function draw(id, traces, layout, size) {
    layout.template = template;
    if (size) layout.width = size.width;
    if (size && !layout.height) layout.height = size.height;
    // On a touch screen, dragging scrolls the page and must not zoom the figure.
    if (touch) layout.dragmode = false;
    labelTicks(layout.xaxis, traces.flatMap((trace) => trace.x));
    labelTicks(layout.yaxis, traces.flatMap((trace) => trace.y));
    Plotly.react(id, traces, layout, config);
  }

  function smallestPositive(values) {
    return values.filter((value) => value > 0).reduce((a, b) => Math.min(a, b), Infinity);
  }

  // Label 1, 2 and 5 with whole numbers on an axis of a few decades, powers of ten on a longer
  // one. By default plotly shows 2 and 5 without their powers, and labels overlap.
  function labelTicks(axis, values) {
    if (axis.type !== "log") return;
    const highest = values.reduce((a, b) => Math.max(a, b), 0);
    const decades = Math.log10(highest / smallestPositive(values));
    axis.minor = { ticks: "outside", ticklen: 3, dtick: "D1" };
    if (decades < 2.5 || (highest < 1e6 && highest >= 1e-4 * 10 ** decades)) axis.tickformat = "~g";
    if (decades === 0 || (decades > 0.7 && decades < 2.5)) axis.dtick = "D2";
    if (decades >= 2.5) axis.dtick = Math.ceil(decades / 7);
  }

  // Figures whose traces are in the page. Plotly modifies its arguments, so pass copies.

  function drawFigure({ id, layout, variants }, size) {
    const variant = variants.length > 1 ? Number(variantChoice.value) : 0;
    draw(id, structuredClone(variants[variant]), structuredClone(layout), size);
  }

  // Training curves, whose traces depend on the controls.

  function shownCurves() {
    const parameters = chosen("parameters");
    const kinds = parameters === "both" ? ["raw", "averaged"] : [parameters];
    const groups = new Set(
      [...controls.querySelectorAll('input[name="run"]:checked')].map((box) => Number(box.value)),
    );
    const others = controls.querySelector('input[name="others"]')?.checked;
    return curves.runs
      .filter((run) => groups.has(run.group) && (run.best || others))
      .sort((one, other) => one.best - other.best)
      .flatMap((run) => kinds.map((kind) => ({ run, kind })));
  }

  function curveTrace({ run, kind }, measure, floor) {
    const axis = chosen("axis");
    const values = run[kind][measure];
    const faint = kind === "raw" && chosen("parameters") === "both";
    return {
      type: "scatter",
      mode: run.best && !faint ? "lines+markers" : "lines",
      name: kind === "raw" ? `${run.label} (raw)` : run.label,
      // A logarithmic axis would draw a line to 0 from infinitely far away.
      x: run.x[axis].map((value) => (value === 0 && chosen("scale-x") === "log" ? null : value)),
      y: values.map((value) => (value === null ? null : Math.max(value, floor))),
      customdata: values,
      opacity: run.best ? (faint ? 0.6 : 1) : 0.35,
      line: { ...run.line, width: run.best && !faint ? 2 : 1.2 },
      marker: { ...run.marker },
      hovertemplate: `%{customdata:.4~g} at %{x:.4~g} ${curves.axes[axis]}`,
    };
  }

  function lowestDrawn(shown, measure) {
    if (chosen("scale-y") === "linear") return 0;
    const values = shown.flatMap(({ run, kind }) => run[kind][measure]);
    const smallest = smallestPositive(values);
    return Number.isFinite(smallest) ? smallest / 2 : 1;
  }

  function drawCurves({ id, layout }, measure, size) {
    const shown = shownCurves();
    const floor = lowestDrawn(shown, measure);
    const traces = shown.map((curve) => curveTrace(curve, measure, floor));
    const shape = structuredClone(layout);
    shape.xaxis.title.text = curves.axes[chosen("axis")];
    shape.xaxis.type = chosen("scale-x");
    shape.yaxis.type = chosen("scale-y");
    // A run with a single evaluation has no line to show.
    for (const trace of traces) if (trace.x.length === 1) trace.mode = "markers";
    draw(id, traces, shape, size);
  }

  // All figures

  function drawAll(only = () => true, fixedSize = false) {
    for (const figure of figures.filter(only)) {
      const measure = curves?.measures.find((name) => figure.id === `curve-${name}`);
      const size = fixedSize ? sizeOf(document.getElementById(figure.id)) : undefined;
      if (measure) drawCurves(figure, measure, size);
      else drawFigure(figure, size);
    }
  }

  function sizeOf({ clientWidth, clientHeight }) {
    return { width: clientWidth, height: clientHeight };
  }

  drawAll();
  controls?.addEventListener("change", () => drawAll((figure) => figure.id.startsWith("curve-")));
  variantChoice?.addEventListener("change", () => drawAll((figure) => figure.variants.length > 1));
  // Paper is narrower than most windows, and figures are not resized while the page is printed.
  addEventListener("beforeprint", () => {
    document.body.classList.add("printing");
    drawAll(undefined, true);
  });
  addEventListener("afterprint", () => {
    document.body.classList.remove("printing");
    drawAll();
    for (const { id } of figures) Plotly.Plots.resize(id);
  });
})();
