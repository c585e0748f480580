// Steps through the pictures of a plan, and shows the messages of one device alone.
function withSteps(root) {
  for (const svg of root.querySelectorAll("svg:has(g[data-step])")) {
    const groups = [...svg.querySelectorAll("g[data-step]")];
    const last = Math.max(...groups.map((group) => Number(group.dataset.step)));
    const bar = document.createElement("div");
    bar.className = "steps";
    const button = (text) => bar.appendChild(Object.assign(document.createElement("button"), { type: "button", textContent: text }));
    const back = button("Step back"), on = button("Step on"), whole = button("All steps");
    const label = bar.appendChild(document.createElement("label"));
    const select = document.createElement("select");
    label.append("Messages of ", select);
    const devices = new Set([...svg.querySelectorAll("line")].flatMap((line) => [line.dataset.src, line.dataset.dst]));
    select.append(new Option("all devices", ""));
    for (const device of [...devices].map(Number).sort((a, b) => a - b)) select.append(new Option(`device ${device}`, String(device)));
    const said = bar.appendChild(Object.assign(document.createElement("span"), { role: "status" }));
    said.setAttribute("role", "status");
    let at = last;
    const show = () => {
      for (const group of groups) group.classList.toggle("later", Number(group.dataset.step) > at);
      for (const line of svg.querySelectorAll("line")) {
        line.classList.toggle("aside", select.value !== "" && select.value !== line.dataset.src && select.value !== line.dataset.dst);
      }
      // Not disabled: a button that is loses the focus.
      back.setAttribute("aria-disabled", String(at === 0));
      for (const button of [on, whole]) button.setAttribute("aria-disabled", String(at === last));
      said.textContent = `${at} of ${last} ${last === 1 ? "step" : "steps"}`;
    };
    back.onclick = () => { at = Math.max(at - 1, 0); show(); };
    on.onclick = () => { at = Math.min(at + 1, last); show(); };
    whole.onclick = () => { at = last; show(); };
    select.onchange = show;
    show();
    if (last) svg.before(bar);
  }
}
withSteps(document);
