#!/usr/bin/env bash
# One audit, with every report that GitHub can show. Everything comes through the environment; ends with 0, for
# the reports are to be uploaded whatever the audit found: its status is an output.
set -euo pipefail

folder="$(mktemp -d "${RUNNER_TEMP:-/tmp}/placement-audit.XXXXXX")"
read -ra overrides <<< "$OVERRIDES"
read -ra arguments <<< "$ARGUMENTS"

command=(python -m placement_audit)
if [ "$RANKS" != 0 ]; then
  command=(python -m torch.distributed.run --standalone --nproc-per-node "$RANKS" -m placement_audit)
fi
case "$MEASURE" in
  true) command+=(--measure) ;;
  false) command+=(--no-measure) ;;
  *) echo "::error::measure: expected true or false; got $MEASURE" >&2; exit 2 ;;
esac
command+=(
  --config "$CONFIG" --device "$DEVICE" --format text
  --format "json:$folder/report.json" --format "sarif:$folder/report.sarif"
  --format "html:$folder/report.html" --format "markdown:$folder/summary.md"
  --format "github:$folder/annotations.txt"
)

status=0
"${command[@]}" "${arguments[@]}" -- "${overrides[@]}" || status=$?

if [ -f "$folder/annotations.txt" ]; then
  cat "$folder/annotations.txt"
else
  echo "::error title=placement-audit::the audit ended with status $status before there was a report; its log says why"
fi
if [ -f "$folder/summary.md" ]; then cat "$folder/summary.md" >> "$GITHUB_STEP_SUMMARY"; fi
{
  echo "status=$status"
  echo "folder=$folder"
  if [ -f "$folder/report.sarif" ]; then echo "sarif=$folder/report.sarif"; fi
} >> "$GITHUB_OUTPUT"
