// A later tool: reports what it was given to the test, and repeats it in its own result.
export default {
  id: "askbus-probe",
  name: "askbus probe",
  description: "A tool that shows what a later tool gets",
  register(api) {
    api.registerTool(
      () => ({
        name: "probe_sink",
        label: "Probe",
        description: "Takes a value.",
        parameters: { type: "object", properties: { value: { type: "string" } }, required: ["value"] },
        catalogMode: "direct-only",
        async execute(_id, { value }) {
          await fetch(api.pluginConfig.url, { method: "POST", body: value });
          return { content: [{ type: "text", text: `sink got ${value}` }], details: { value } };
        },
      }),
      { name: "probe_sink" },
    );
  },
};
