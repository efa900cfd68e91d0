// The dashboard of a job: shows the messages of the server.
"use strict";

const $ = id => document.getElementById(id);
const MOST = { points: 3600, evaluations: 1000, tasks: 5000, events: 1000 };
const job = { status: null, over: false, trouble: "", running: [], logs: [], folder: "", rates: {},
  points: [], evaluations: [], tasks: [], events: [] };

// ---------------------------------------------------------------- formatting

const whole = value => Math.round(value).toLocaleString("en-US");
const digits = value => (value === null ? "–" : Math.abs(value) >= 1000 ? whole(value) : String(Number(value.toPrecision(4))));
const short = value => (value === null ? "–" : new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 }).format(value));

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(value || 1) / 10)));
  return `${Number((value / 1024 ** power).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${digits(seconds * 1000)} ms`;
  if (seconds < 60) return `${digits(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---------------------------------------------------------------- messages of the server

function takeIn(message) {
  if (message.whole) for (const name of Object.keys(MOST)) job[name] = [];
  for (const name of Object.keys(MOST)) {
    for (const [, entry] of message.past[name]) job[name].push(entry);
    while (job[name].length > MOST[name]) {
      job[name] = name === "points" ? job[name].filter((_, at) => at % 2 === 0) : job[name].slice(-MOST[name]);
    }
  }
  if (message.rates) job.rates = message.rates;
  else for (const each of message.status ? message.status.processes : []) {
    if (each.role === "worker") job.rates[each.index] = [...(job.rates[each.index] || []), each.records_per_second || 0].slice(-60);
  }
  for (const name of ["status", "over", "trouble", "running", "logs", "folder"]) job[name] = message[name];
}

function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem("key", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("key") || "";
}

const headers = { Authorization: `Bearer ${takeKey()}` };

async function ask(path, body) {
  const request = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await (await fetch(path, request)).json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

async function follow() {
  for (;;) {
    try {
      const response = await fetch("/api/stream", { headers });
      if (response.status === 403) {
        job.trouble = (await response.json()).error;
        show();
        return;
      }
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        events.forEach(event => takeIn(JSON.parse(event.slice("data: ".length))));
        if (events.length) showSoon();
      }
    } catch (error) {
      console.warn(error);
    }
    job.trouble = job.over
      ? `The job has ended, and so has its dashboard. To see this page again: elasticcb dashboard ${job.folder}`
      : "The dashboard does not answer. This page shows its last message.";
    show();
    await new Promise(resolve => setTimeout(resolve, 2000));
  }
}

// ---------------------------------------------------------------- display

const charts = {
  loss: new Chart($("loss"), [["loss", "blue"]], digits),
  metrics: new Chart($("metrics"), [["metric", "teal"]], digits),
  rate: new Chart($("rate"), [["records/s", "green"]], short),
  push: new Chart($("push"), [["mean push", "violet"]], duration),
  crew: new Chart($("crew"), [["workers up", "blue", true], ["servers up", "orange", true]], digits),
};
const stream = new Stream($("stream"), $("tip"));
let asked = false;

function showSoon() {
  if (asked || document.hidden) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; show(); });
}

function show() {
  $("trouble").hidden = !job.trouble && !(job.status && job.status.error);
  setText($("trouble"), job.trouble || (job.status ? job.status.error : ""));
  setText($("live"), job.over ? "ended" : job.trouble || !job.status ? "" : "live");
  $("scale").disabled = $("stop").disabled = job.over || !job.status || Boolean(job.trouble);
  setText($("folder"), job.folder);
  if (!job.status) return;
  showHeader(job.status);
  showCurves(job.status);
  showStream(job.status);
  showWorkers(job.status);
  showServers(job.status);
  showEvents();
  showLogNames();
}

// How many tasks of all types are in a state.
function tasksIn(status, state) {
  return Object.values(status.tasks).reduce((total, states) => total + (states[state] || 0), 0);
}

function showHeader(status) {
  setText($("name"), status.name || status.command || "job");
  document.title = `${status.phase} – ${status.name || "ElasticCB"}`;
  setText($("phase"), status.phase);
  const degraded = status.conditions.find(each => each.type === "Degraded");
  const mood = { done: "good", failed: "bad", interrupted: "warn" }[status.phase];
  $("phase").className = `badge ${mood || (degraded.status === "True" ? "warn" : "")}`;
  $("phase").title = degraded.message;
  const { records_trained: trained, records_total: planned } = status, share = planned ? Math.min(1, trained / planned) : 0;
  $("bar").hidden = !planned;
  $("bar").setAttribute("aria-valuenow", Math.round(share * 100));
  $("done").style.width = `${share * 100}%`;
  const { workers, servers } = status;
  const tasks = state => tasksIn(status, state);
  const lost = workers.lost + servers.lost;
  // name: [text, the value of the document that it shows]
  const figures = {
    "progress": planned && [`${Math.floor(share * 100)} %`, trained],
    "epoch": status.epoch && [status.epochs ? `${status.epoch} of ${status.epochs}` : `${status.epoch}`, status.epoch],
    "time left": status.seconds_left !== null && [duration(status.seconds_left), status.seconds_left],
    "records": trained && [planned ? `${short(trained)} of ${short(planned)}` : short(trained), trained],
    "behind the stream": Object.keys(status.stream).length > 0 && [`${whole(status.lag_records)} records, ${duration(Math.floor(status.lag_seconds))}`, status.lag_records],
    "evaluated": status.records_evaluated && [whole(status.records_evaluated), status.records_evaluated],
    "predicted": status.records_predicted && [whole(status.records_predicted), status.records_predicted],
    "records/s": status.records_per_second && [short(status.records_per_second), status.records_per_second],
    "version": [whole(status.version), status.version],
    "loss": status.loss !== null && [digits(status.loss), status.loss],
    "workers": [`${workers.up} of ${workers.planned}`, workers.up],
    "servers": [`${servers.up} of ${servers.planned}`, servers.up],
    "tasks to do": [`${whole(tasks("todo"))}, ${tasks("doing")} running`, tasks("todo")],
    "processes lost": lost && [`${lost}, ${workers.replaced + servers.replaced} replaced`, lost],
    "records repeated": status.records_repeated && [`at most ${whole(status.records_repeated)}`, status.records_repeated],
    "last checkpoint": status.checkpoint_age_seconds !== null && [`${duration(Math.floor(status.checkpoint_age_seconds))} ago`, status.checkpoint_age_seconds],
  };
  for (const [name, value] of Object.entries(figures)) {
    const id = `figure-${name.replace(/\W/g, "-")}`;
    let shown = $(id);
    if (!value) {
      if (shown) shown.parentElement.remove();
      continue;
    }
    if (!shown) {
      const group = document.createElement("div");
      group.append(document.createElement("dt"), document.createElement("dd"));
      group.firstChild.textContent = name;
      shown = group.lastChild;
      shown.id = id;
      group.style.order = Object.keys(figures).indexOf(name);
      $("figures").append(group);
    }
    shown.dataset.value = value[1];
    setText(shown, value[0]);
  }
}

function showCurves(status) {
  const column = at => job.points.map(point => point[at]), times = column(0);
  const losses = column(2).map(loss => (charts.loss.log && loss <= 0 ? null : loss));
  charts.loss.show([times, losses]);
  charts.rate.show([times, column(4)]);
  charts.push.show([times, column(7)]);
  charts.crew.show([times, column(5), column(6)]);
  setText($("loss-now"), status.loss === null ? "" : digits(status.loss));
  setText($("rate-now"), status.records_per_second ? `${short(status.records_per_second)} records/s` : "");
  const push = status.latencies.push;
  setText($("push-now"), push && push.calls ? `95 % within ${duration(push.p95_seconds)}` : "");
  const names = [...new Set([...Object.keys(status.metrics), ...job.evaluations.flatMap(each => Object.keys(each[2]))])];
  setText($("metrics-now"), Object.entries(status.metrics).map(([name, value]) => `${name} ${digits(value)}`).join(", "));
  const choice = $("metric");
  choice.hidden = names.length < 2;
  offer(choice, names);
  charts.metrics.series[0][0] = choice.value || "metric";
  charts.metrics.show([job.evaluations.map(each => each[0]), job.evaluations.map(each => each[2][choice.value] ?? null)]);
}

function offer(select, names) {
  if ([...select.options].map(each => each.value).join() === names.join()) return;
  const chosen = select.value;
  select.replaceChildren(...names.map(name => new Option(name)));
  if (names.includes(chosen)) select.value = chosen;
}

function showStream(status) {
  const runs = [...job.tasks, ...job.running], span = Number($("window").value);
  const last = runs.reduce((latest, run) => Math.max(latest, run[2] || run[1]), job.points.length ? job.points[job.points.length - 1][0] : 0);
  const places = status.processes.filter(each => each.role === "worker").map(each => each.index);
  stream.draw(runs, job.events, places, status.stragglers, last || Date.now() / 1000, span);
  const { tasks_taken_over: taken, tasks_retried: retried } = status, tasks = state => tasksIn(status, state);
  setText($("tasks-now"), `${whole(tasks("done"))} done, ${tasks("doing")} running, ${whole(tasks("todo"))} to do` +
    (taken ? `, ${taken} taken over` : "") + (retried ? `, ${retried} retried` : ""));
}

function rowOf(body, key, cells) {
  let row = body.querySelector(`tr[data-key="${CSS.escape(key)}"]`);
  if (!row) {
    row = document.createElement("tr");
    row.dataset.key = key;
    for (const kind of cells) row.insertCell().className = kind;
    body.append(row);
  }
  return row;
}

function keepRows(body, keys) {
  for (const row of [...body.rows]) if (!keys.has(row.dataset.key)) row.remove();
}

const where = process => (process.pid === null ? "" : `${process.host}, pid ${process.pid}`);
const stateOf = process => (process.straggler ? "slow" : process.state === "up" ? "up" : process.state === "left" ? "" : "missing");

function showWorkers(status) {
  const workers = status.processes.filter(each => each.role === "worker"), body = $("workers");
  const most = Math.max(1, ...workers.flatMap(each => job.rates[each.index] || [0])), stroke = color("green");
  for (const each of workers) {
    const row = rowOf(body, String(each.index), ["", "", "number", "", "number", "number", "number", "number", "muted"]);
    const cells = row.cells;
    if (!cells[3].firstChild) cells[3].append(document.createElement("canvas"));
    sparkline(cells[3].firstChild, job.rates[each.index] || [], most, stroke);
    cells[0].className = `dot ${stateOf(each)}`;
    const texts = [each.index, each.straggler ? "straggler" : each.state, each.records_per_second === null ? "–" : digits(each.records_per_second), null,
      each.batches === null ? "–" : whole(each.batches), each.seconds_per_batch === null ? "–" : duration(each.seconds_per_batch),
      duration(each.cpu_seconds), bytes(each.resident_bytes), where(each)];
    texts.forEach((text, at) => text !== null && setText(cells[at], String(text)));
  }
  keepRows(body, new Set(workers.map(each => String(each.index))));
  setText($("workers-now"), `${status.workers.up} of ${status.workers.planned} up` + (status.workers.lost ? `, ${status.workers.lost} lost` : ""));
}

function showServers(status) {
  const servers = status.processes.filter(each => each.role === "ps"), body = $("servers");
  for (const each of servers) {
    const row = rowOf(body, String(each.index), ["", "", "number", "number", "number", "number", "muted"]);
    row.cells[0].className = `dot ${stateOf(each)}`;
    const tables = Object.values(each.tables), sum = name => tables.reduce((total, table) => total + table[name], 0);
    [each.index, each.state, tables.length ? whole(sum("rows")) : "–", tables.length ? bytes(sum("bytes")) : "–",
      duration(each.cpu_seconds), bytes(each.resident_bytes), where(each)].forEach((text, at) => setText(row.cells[at], String(text)));
  }
  keepRows(body, new Set(servers.map(each => String(each.index))));
  setText($("servers-now"), `${status.servers.up} of ${status.servers.planned} up` + (status.updates_lost ? `, updates lost: ${status.updates_lost}` : ""));
  const tables = Object.entries(status.tables);
  $("tables-part").hidden = !tables.length;
  $("count").disabled = job.over;
  for (const [path, size] of tables) {
    const cells = rowOf($("tables"), path, ["", "number", "number", "number", ""]).cells;
    [path, whole(size.rows), bytes(size.bytes)].forEach((text, at) => setText(cells[at], text));
  }
}

function showEvents() {
  const list = $("events"), newest = job.events.slice(-300), mark = newest.length ? newest[newest.length - 1].join() + newest.length : "";
  if (list.dataset.mark === mark) return;
  list.dataset.mark = mark;
  list.replaceChildren(...newest.reverse().map(([time, kind, text]) => {
    const item = document.createElement("li"), when = document.createElement("time");
    item.className = kind;
    when.textContent = clockTime(time);
    item.append(when, text);
    return item;
  }));
}

function showLogNames() {
  offer($("process"), [...job.logs].sort((one, other) => (other === "master") - (one === "master")));
}

async function showLog() {
  const process = $("process").value, log = $("log");
  if (!process || document.hidden || (job.over && job.trouble)) return;
  try {
    const text = (await ask(`/api/log?process=${encodeURIComponent(process)}`)).lines.join("") || "The log is empty.";
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
    if (log.textContent === text) return;
    log.textContent = text;
    if (atEnd) log.scrollTop = log.scrollHeight;
  } catch (error) {
    console.warn(error);
  }
}

// ---------------------------------------------------------------- user actions

let hiding;
function toast(text) {
  $("toast").textContent = text;
  $("toast").hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { $("toast").hidden = true; }, 8000);
}

async function act(path, body) {
  try {
    toast((await ask(path, body)).done);
  } catch (error) {
    toast(error.message);
  }
}

$("scale").addEventListener("click", () => {
  $("scale-workers").value = job.status.workers.planned;
  $("scale-servers").value = job.status.servers.planned;
  $("scale-dialog").showModal();
});
$("scale-dialog").addEventListener("close", event => {
  if (event.target.returnValue !== "yes") return;
  event.target.returnValue = "";
  const wanted = { workers: Number($("scale-workers").value), ps: Number($("scale-servers").value) };
  if (wanted.workers === job.status.workers.planned) delete wanted.workers;
  if (wanted.ps === job.status.servers.planned) delete wanted.ps;
  if (Object.keys(wanted).length) act("/api/scale", wanted);
});
$("stop").addEventListener("click", () => $("stop-dialog").showModal());
$("stop-dialog").addEventListener("close", event => {
  if (event.target.returnValue !== "yes") return;
  event.target.returnValue = "";
  toast("The job is stopping.");
  act("/api/stop", {});
});
$("count").addEventListener("click", async () => {
  try {
    for (const table of (await ask("/api/tables")).tables) {
      const cells = rowOf($("tables"), table.path, ["", "number", "number", "number", ""]).cells;
      setText(cells[3], table.lookups === null ? "–" : whole(table.lookups));
      setText(cells[4], table.top.map(([id, hits]) => `${id} (${short(hits)})`).join(", ") || "–");
    }
  } catch (error) {
    toast(error.message);
  }
});
$("log-scale").addEventListener("change", event => {
  charts.loss.log = event.target.checked;
  charts.loss.again();
  show();
});
$("metric").addEventListener("change", () => { show(); charts.metrics.again(); });
$("window").addEventListener("change", show);
$("process").addEventListener("change", () => { $("log").textContent = ""; showLog(); });
document.addEventListener("visibilitychange", () => { showSoon(); showLog(); });
window.addEventListener("resize", showSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  Object.values(charts).forEach(chart => chart.again());
  showLegend();
  show();
});

function showLegend() {
  const marks = [["blue", "training"], ["teal", "evaluation"], ["green", "prediction, other"], ["violet", "done again"], ["orange", "went back to another worker"], ["red", "failed"]];
  $("legend").replaceChildren(...marks.map(([name, text]) => {
    const item = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = color(name);
    item.append(mark, text);
    return item;
  }));
}

showLegend();
follow();
setInterval(showLog, 3000);
setTimeout(showLog, 1200);
