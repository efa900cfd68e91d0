// Charts: curves (uPlot), sparklines, and the tasks of workers over time.
"use strict";

const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function clockTime(seconds, withSeconds = true) {
  const format = { hour12: false, hour: "2-digit", minute: "2-digit", ...(withSeconds && { second: "2-digit" }) };
  return new Date(seconds * 1000).toLocaleTimeString("en-GB", format);
}

const SHORTEST_SECONDS = 10; // of the time axis

// A chart of curves over time; `series`: [label, color, stepped].
class Chart {
  constructor(element, series, format) {
    this.element = element;
    this.series = series;
    this.format = format;
    this.log = false;
    this.data = null;
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(element);
  }

  size() {
    return { width: this.element.clientWidth, height: this.element.clientHeight - 24 };
  }

  show(data) {
    this.data = data;
    const empty = !data[0].length || data.slice(1).every(values => values.every(value => value === null));
    if (empty) {
      this.clear();
      if (!this.element.firstChild) {
        const note = document.createElement("p");
        note.className = "empty";
        note.textContent = "nothing to show";
        this.element.append(note);
      }
    } else if (this.plot) {
      this.plot.setData(data);
    } else {
      this.element.replaceChildren();
      this.plot = new uPlot(this.options(), data, this.element);
    }
  }

  // Redraws after a change of the theme or of the series.
  again() {
    this.clear();
    if (this.data) this.show(this.data);
  }

  clear() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.element.querySelectorAll(".uplot").forEach(each => each.remove());
  }

  options() {
    const line = { stroke: color("muted"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const times = (plot, values) => {
      const span = plot.scales.x.max - plot.scales.x.min;
      const labels = values.map(value => clockTime(value, span < 600));
      return labels.map((label, at) => (label === labels[at - 1] ? "" : label));
    };
    // Of a single time, uPlot would show a day.
    const range = (plot, from, to) => {
      const [first, last] = [plot.data[0][0], plot.data[0][plot.data[0].length - 1]];
      return first === last ? [first - SHORTEST_SECONDS / 2, first + SHORTEST_SECONDS / 2]
        : [from, Math.max(to, from + SHORTEST_SECONDS)];
    };
    return {
      ...this.size(),
      cursor: { y: false, points: { size: 5 } },
      padding: [6, 28, 0, 0],
      scales: { x: { time: true, range }, y: this.log ? { distr: 3 } : {} },
      axes: [
        { ...line, values: times, space: 80, size: 24 },
        { ...line, values: (plot, values) => values.map(value => (value === null ? "" : this.format(value))), size: 62, space: 28 },
      ],
      series: [
        { label: "time", value: (plot, value) => (value === null ? "" : clockTime(value)) },
        ...this.series.map(([label, name, stepped]) => ({
          label, stroke: color(name), width: 1.5, spanGaps: true, points: { show: (plot, at) => plot.data[at].filter(value => value !== null).length === 1, size: 6 },
          value: (plot, value) => (value === null || value === undefined ? "" : this.format(value)),
          ...(stepped && { paths: uPlot.paths.stepped({ align: 1 }) }),
        })),
      ],
    };
  }
}

// Clears a canvas and fits it to its displayed size.
function brush(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function sparkline(canvas, values, most, stroke) {
  const context = brush(canvas, 90, 18);
  if (values.length < 2) return;
  context.strokeStyle = stroke;
  context.lineWidth = 1.3;
  context.beginPath();
  values.forEach((value, at) => context.lineTo((at / 59) * 88 + 1, 17 - (value / (most || 1)) * 16));
  context.stroke();
}

const TASK_COLORS = { training: "blue", evaluation: "teal", prediction: "green", function: "green", train_end: "green" };
const EVENT_COLORS = { loss: "red", recovery: "green", checkpoint: "violet" };

function colorOfTask([, , , type, outcome, , , again]) {
  if (outcome === "failed") return "red";
  if (outcome === "back") return "orange";
  return again ? "violet" : TASK_COLORS[type] || "muted";
}

// The tasks of workers over time: a row for each index, for `most` seconds up to `until`.
class Stream {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.boxes = [];
    canvas.addEventListener("pointermove", event => this.point(event));
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  draw(runs, events, places, slow, until, most) {
    const first = runs.reduce((earliest, run) => Math.min(earliest, run[1]), until);
    const span = Math.max(10, Math.min(most, until - first));
    const width = this.canvas.parentElement.clientWidth;
    const count = Math.max(1, ...places.map(place => place + 1), ...runs.map(run => run[0] + 1));
    const row = Math.max(4, Math.min(22, Math.floor(440 / count)));
    const left = 34, bottom = 18, height = count * row + bottom, from = until - span;
    const context = brush(this.canvas, width, height), x = time => left + ((time - from) / span) * (width - left);
    const names = ["text", "muted", "line", "blue", "teal", "green", "red", "orange", "violet"];
    const colors = Object.fromEntries(names.map(name => [name, color(name)]));
    context.font = "11px system-ui";
    context.textAlign = "right";
    const labelled = Math.ceil(12 / row);
    for (let place = 0; place < count; place++) {
      if (place % labelled && !slow.includes(place)) continue;
      context.fillStyle = slow.includes(place) ? colors.orange : colors.muted;
      context.fillText(place, left - 8, place * row + row / 2 + 4);
    }
    this.boxes = [];
    for (const run of runs) {
      const [place, begun, ended] = run, end = ended === null ? until : ended;
      if (end < from || begun > until) continue;
      const start = Math.max(x(begun), left), wide = Math.max(1, x(end) - start - 1);
      context.globalAlpha = ended === null ? 0.55 : 1;
      context.fillStyle = colors[colorOfTask(run)] || colors.muted;
      context.fillRect(start, place * row + 1, wide, row - (row > 6 ? 3 : 1));
      this.boxes.push([start, place * row, wide, row, run]);
    }
    context.globalAlpha = 1;
    for (const [time, kind] of events) {
      if (time < from || time > until || !EVENT_COLORS[kind]) continue;
      context.fillStyle = colors[EVENT_COLORS[kind]];
      context.fillRect(x(time), 0, 1.5, height - bottom);
    }
    context.fillStyle = colors.muted;
    context.textAlign = "center";
    const marks = width < 500 ? 3 : 6;
    for (let mark = 0; mark <= marks; mark++) {
      const time = from + (span * mark) / marks;
      context.textAlign = mark === marks ? "right" : mark ? "center" : "left";
      context.fillText(clockTime(time), x(time), height - 4);
    }
  }

  point(event) {
    const area = this.canvas.getBoundingClientRect(), x = event.clientX - area.left, y = event.clientY - area.top;
    const box = this.boxes.findLast(([left, top, wide, high]) => x >= left && x <= left + wide && y >= top && y <= top + high);
    this.tip.hidden = !box;
    if (!box) return;
    const [place, begun, ended, type, outcome, task, records, again] = box[4];
    const took = ended === null ? "runs" : `${(ended - begun).toFixed(2)} s, ${outcome}`;
    this.tip.textContent = `worker ${place}: task ${task}, ${type}, ${records} ${records === 1 ? "record" : "records"}, ${took}${again ? ", again" : ""}`;
    this.tip.style.left = `${Math.min(x + 10, area.width - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${y + 14}px`;
  }
}
