{{- /* What `gpushare templates check` refuses and values.schema.json cannot say. Fails with the path of the value. */ -}}
{{- define "gpushare-agent.checkTemplate" -}}
{{- $path := printf "templates.%s" .name -}}
{{- $gpu := index .template "gpu" -}}
{{- $idle := default dict (index .template "idle") -}}
{{- $share := 0.0 -}}
{{- if $gpu -}}
{{- $fraction := index $gpu "fraction" -}}
{{- $count := index $gpu "count" -}}
{{- if eq (kindIs "invalid" $fraction) (kindIs "invalid" $count) -}}
{{- fail (printf "%s.gpu: give either fraction (a part of one GPU) or count (whole GPUs)" $path) -}}
{{- end -}}
{{- if not (kindIs "invalid" $fraction) -}}
{{- include "gpushare-agent.checkFraction" (dict "path" (printf "%s.gpu.fraction" $path) "value" $fraction) -}}
{{- $share = float64 $fraction -}}
{{- else -}}
{{- $share = 1.0 -}}
{{- end -}}
{{- end -}}
{{- $before := 0.0 -}}
{{- $earlier := "" -}}
{{- range $step := list "downgrade_after" "release_after" "stop_after" -}}
{{- $written := index $idle $step -}}
{{- if not (kindIs "invalid" $written) -}}
{{- if and (not $gpu) (ne $step "stop_after") -}}
{{- fail (printf "%s.idle.%s: needs a gpu; a template without one can only stop_after" $path $step) -}}
{{- end -}}
{{- $seconds := float64 (include "gpushare-agent.seconds" $written) -}}
{{- if le $seconds 0.0 -}}
{{- fail (printf "%s.idle.%s: must be more than 0 s" $path $step) -}}
{{- end -}}
{{- if le $seconds $before -}}
{{- fail (printf "%s.idle.%s: %v must be more than %s" $path $step $written $earlier) -}}
{{- end -}}
{{- $before = $seconds -}}
{{- $earlier = printf "%s (%v)" $step $written -}}
{{- end -}}
{{- end -}}
{{- $smaller := index $idle "downgrade_to" -}}
{{- if ne (kindIs "invalid" $smaller) (kindIs "invalid" (index $idle "downgrade_after")) -}}
{{- fail (printf "%s.idle: downgrade_after and downgrade_to belong together: give both or neither" $path) -}}
{{- end -}}
{{- if not (kindIs "invalid" $smaller) -}}
{{- include "gpushare-agent.checkFraction" (dict "path" (printf "%s.idle.downgrade_to" $path) "value" $smaller) -}}
{{- if ge (float64 $smaller) $share -}}
{{- fail (printf "%s.idle.downgrade_to: %v must be less than the share (%v)" $path $smaller $share) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "gpushare-agent.checkFraction" -}}
{{- $units := mulf (float64 .value) 100.0 -}}
{{- $off := subf $units (round $units 0) -}}
{{- if or (gt $off 0.000001) (lt $off -0.000001) -}}
{{- fail (printf "%s: %v is finer than 0.01: write a fraction of one GPU in steps of 0.01, like 0.25" .path .value) -}}
{{- end -}}
{{- end }}

{{- /* Seconds of a duration like 90, "15m" or "1h30m". */ -}}
{{- define "gpushare-agent.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 -}}
{{- $total := 0.0 -}}
{{- if and (kindIs "string" .) (regexMatch "[a-z]" .) -}}
{{- range regexFindAll "[0-9]+(\\.[0-9]+)?\\s*(ms|[smhd])" . -1 -}}
{{- $number := float64 (regexFind "^[0-9.]+" .) -}}
{{- $total = addf $total (mulf $number (index $units (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- else -}}
{{- $total = float64 (trim (toString .)) -}}
{{- end -}}
{{- $total -}}
{{- end }}
