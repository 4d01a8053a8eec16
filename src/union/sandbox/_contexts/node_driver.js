// The driver of a Node context: runs inside the sandbox and keeps variables between cells. The main
// thread evaluates. A worker reads the messages of the host, so that an interrupt arrives while the
// main thread is busy. The messages are those of frames.py, each packet after its length, because Node
// reads streams only. Output goes to descriptors 1 and 2.
'use strict';
const FD = 9;
const MAX_PACKET = 64 * 1024;
const MAX_DISPLAYS = 1000;
const MAX_RESULT_BYTES = 16 * 1024 * 1024;
const MAX_TEXT = 32 * 1024;
const BUSY_MS = 50;

function worker() {
  const net = require('node:net');
  const inspector = require('node:inspector');
  const { parentPort, workerData } = require('node:worker_threads');
  const session = new inspector.Session();
  session.connectToMainThread();
  const handled = new Int32Array(workerData.shared);
  let received = Buffer.alloc(0);
  let parts = [];

  function onPacket(packet) {
    if (packet[0] & 1) parts = [];
    parts.push(packet.subarray(5));
    if (packet.readUInt32LE(1) !== 0) return;
    const body = Buffer.concat(parts);
    const end = 4 + body.readUInt32LE(0);
    const head = JSON.parse(body.subarray(4, end).toString());
    const before = Atomics.load(handled, 0);
    parentPort.postMessage({ head, raw: body.subarray(end).toString() });
    if (head.op !== 'interrupt') return;
    if (Atomics.wait(handled, 0, before, workerData.busyMs) === 'timed-out') {
      session.post('Runtime.terminateExecution'); // the main thread does not return to its loop
    }
  }

  const socket = new net.Socket({ fd: workerData.fd, readable: true, writable: false });
  socket.on('data', (data) => {
    received = Buffer.concat([received, data]);
    while (received.length >= 4 && received.length >= 4 + received.readUInt32LE(0)) {
      const end = 4 + received.readUInt32LE(0);
      onPacket(received.subarray(4, end));
      received = received.subarray(end);
    }
  });
  socket.on('close', () => process.kill(process.pid, 'SIGKILL')); // the host closed the context
}

(() => {
  const fs = require('node:fs');
  const inspector = require('node:inspector');
  const util = require('node:util');
  const { createRequire } = require('node:module');
  const { Worker } = require('node:worker_threads');

  const session = new inspector.Session();
  session.connect();
  const shared = new SharedArrayBuffer(4);
  const handled = new Int32Array(shared);
  let current = 0;
  let running = null;
  let shown = { displays: 0, bytes: 0, dropped: 0 };

  function send(head, raw = Buffer.alloc(0)) {
    const text = Buffer.from(JSON.stringify(head));
    const length = Buffer.alloc(4);
    length.writeUInt32LE(text.length);
    const body = Buffer.concat([length, text, raw]);
    for (let start = 0; start < body.length; start += MAX_PACKET - 5) {
      const part = body.subarray(start, start + MAX_PACKET - 5);
      const head = Buffer.alloc(9);
      head.writeUInt32LE(part.length + 5);
      head[4] = start === 0 ? 1 : 0;
      head.writeUInt32LE(body.length - start - part.length, 5);
      write(Buffer.concat([head, part]));
    }
  }

  function write(data) {
    for (let sent = 0; sent < data.length;) {
      try {
        sent += fs.writeSync(FD, data, sent);
      } catch (error) {
        if (error.code !== 'EAGAIN') throw error;
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1); // the host reads slowly
      }
    }
  }

  function show(value, result) {
    const parts = [];
    let text;
    try {
      text = util.inspect(value, { depth: 4, maxArrayLength: 200, maxStringLength: MAX_TEXT });
    } catch (error) {
      text = `<inspection failed: ${error && error.name}>`;
    }
    parts.push(['text/plain', Buffer.from(text.slice(0, MAX_TEXT)), false]);
    if (Buffer.isBuffer(value) && value.subarray(0, 4).toString('latin1') === '\x89PNG') {
      parts.push(['image/png', value, true]);
    } else if (Array.isArray(value) || (value && Object.getPrototypeOf(value) === Object.prototype)) {
      try {
        parts.push(['application/json', Buffer.from(JSON.stringify(value)), false]);
      } catch { /* not a JSON value */ }
    }
    const size = parts.reduce((sum, [, content]) => sum + content.length, 0);
    if (shown.displays >= MAX_DISPLAYS || shown.bytes + size > MAX_RESULT_BYTES) {
      shown.dropped += 1;
      return;
    }
    shown.displays += 1;
    shown.bytes += size;
    const described = parts.map(([mime, content, raw]) => ({ mime, size: content.length, raw }));
    const head = { t: 'display', n: current, result, parts: described };
    send(head, Buffer.concat(parts.map(([, content]) => content)));
  }

  function post(method, params) {
    return new Promise((resolve, reject) => {
      session.post(method, params, (error, found) => (error ? reject(error) : resolve(found)));
    });
  }

  function errorOf(details) {
    const exception = details.exception || {};
    const text = String(exception.description ?? exception.value ?? details.text ?? '');
    const first = text.split('\n')[0];
    const name = exception.className || (exception.type ? exception.type : 'Error');
    const value = first.startsWith(`${name}: `) ? first.slice(name.length + 2) : first;
    const frames = [...text.matchAll(/^ +at (?:(.+) \()?(.+?):(\d+):\d+\)?$/gm)];
    return {
      name: name.slice(0, 400),
      value: value.slice(0, 16384),
      traceback: text.replaceAll(/\bcell-(\d+)/g, '<cell $1>').slice(0, 48 * 1024),
      frames: frames.reverse().slice(-50).map(([, name, file, line]) => ({
        file: file.replace(/^cell-(\d+)$/, '<cell $1>').slice(0, 400),
        line: Number(line),
        function: (name || '<module>').slice(0, 400),
        text: '',
      })),
    };
  }

  const interrupted = () => ({ name: 'Interrupted', value: 'the cell was interrupted' });

  async function evaluate(code, number) {
    const expression = `${code}\n//# sourceURL=cell-${number}`;
    const options = { expression, replMode: true, awaitPromise: true, userGesture: false };
    let found;
    try {
      found = await Promise.race([
        post('Runtime.evaluate', options),
        new Promise((resolve) => { running = () => resolve('interrupted'); }),
      ]);
    } catch {
      return { error: interrupted() }; // terminated
    }
    if (found === 'interrupted') return { error: interrupted() };
    if (found.exceptionDetails) {
      const isTerminated = !found.exceptionDetails.exception;
      return { error: isTerminated ? interrupted() : errorOf(found.exceptionDetails) };
    }
    return { result: found.result };
  }

  async function cell(head, raw) {
    current = head.n;
    shown = { displays: 0, bytes: 0, dropped: 0 };
    const cpu = process.cpuUsage();
    const env = {};
    for (const [name, value] of Object.entries(head.env ?? {})) {
      env[name] = process.env[name];
      process.env[name] = value;
    }
    let error = null;
    let value = null;
    if (head.op === 'set') {
      Object.assign(globalThis, JSON.parse(raw));
    } else if (head.op === 'get') {
      const found = await evaluate(`JSON.stringify(${head.name})`, current);
      error = found.error ?? null;
      if (!error && found.result.type !== 'string') {
        error = { name: 'TypeError', value: `${head.name} is not a JSON value` };
      }
      value = error ? null : Buffer.from(found.result.value);
    } else {
      const found = await evaluate(raw, current);
      error = found.error ?? null;
      if (!error) await showResult(found.result);
    }
    running = null;
    for (const [name, old] of Object.entries(env)) {
      if (old === undefined) delete process.env[name];
      else process.env[name] = old;
    }
    const used = process.cpuUsage(cpu);
    send({
      t: 'done',
      n: head.n,
      error,
      dropped: shown.dropped,
      user_s: used.user / 1e6,
      system_s: used.system / 1e6,
      rss: process.memoryUsage.rss(),
      value: value !== null,
    }, value ?? undefined);
  }

  async function showResult(result) {
    if (result.type === 'undefined') return;
    if (result.objectId === undefined) {
      const isPlain = result.unserializableValue === undefined;
      const value = isPlain ? result.value : result.unserializableValue;
      show(isPlain ? value : { [util.inspect.custom]: () => value }, true);
      return;
    }
    const functionDeclaration = 'function () { globalThis[Symbol.for("union.show")](this); }';
    await post('Runtime.callFunctionOn', { objectId: result.objectId, functionDeclaration });
    await post('Runtime.releaseObject', { objectId: result.objectId });
  }

  Object.defineProperty(globalThis, Symbol.for('union.show'), {
    value: (value) => show(value, true),
  });
  globalThis.display = (...values) => values.forEach((value) => show(value, false));
  globalThis.require = createRequire(`${process.cwd()}/`);
  process.on('SIGINT', () => {});
  process.on('uncaughtException', (error) => console.error(error));
  process.on('unhandledRejection', (error) => console.error(error));

  let queue = Promise.resolve();
  const reader = new Worker(`(${worker})()`, {
    eval: true,
    workerData: { shared, fd: FD, busyMs: BUSY_MS },
  });
  reader.on('message', ({ head, raw }) => {
    if (head.op === 'interrupt') {
      Atomics.add(handled, 0, 1);
      Atomics.notify(handled, 0);
      if (head.n === current && running) running();
      return;
    }
    queue = queue.then(() => cell(head, raw));
  });
  send({ t: 'ready' });
})();
