// What a page would do that is up to no good; what came of each attempt is the answer.
async (there, session) => {
  const found = {};
  const attempt = async (name, call) => {
    try {
      found[name] = await call();
    } catch (error) {
      found[name] = error.name;
    }
  };
  const run = `${there}/v1/run`;
  const body = "echo attacked";
  const headers = { Authorization: "Bearer any" };
  await attempt("read", async () => (await fetch(`${there}/v1/console`, { headers })).status);
  await attempt("run", async () => (await fetch(run, { method: "POST", body, headers })).status);
  await attempt("blind", async () => (await fetch(run, { method: "POST", body, mode: "no-cors" })).type);
  await attempt("beacon", async () => navigator.sendBeacon(run, body));
  await attempt("import", async () => "follow" in await import(`${there}/console/api.js`));
  await attempt("socket", () => new Promise((done) => {
    const address = `${there.replace("http", "ws")}/v1/sessions/${session}/connect`;
    const socket = new WebSocket(address, "union-sandbox.1");
    socket.onopen = () => { socket.close(); done("open"); };
    socket.onerror = () => done("refused");
  }));
  await attempt("frame", () => new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.src = `${there}/console/`;
    frame.onload = () => {
      try {
        done(frame.contentDocument?.title || "nothing");
      } catch (error) {
        done(error.name);
      }
    };
    document.body.append(frame);
  }));
  return found;
}
