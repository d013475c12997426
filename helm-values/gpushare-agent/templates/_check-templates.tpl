{{- /* What `gpushare templates check` refuses and values.schema.json cannot say. Fails with the path of the value. */ -}}
{{- define "gpushare-agent.checkTemplate" -}}
{{- $path := printf "templates.%s" .name -}}
{{- if eq .name "quotas" -}}
{{- fail "templates.quotas: the name is reserved for quotas: choose another, or write quotas in the value quotas" -}}
{{- end -}}
{{- if eq .name "idle" -}}
{{- fail "templates.idle: the name is reserved for the idle policy: choose another, or write the policy in the value idlePolicy" -}}
{{- end -}}
{{- if eq .name "layers" -}}
{{- fail "templates.layers: the name is reserved for sharing layers: choose another, or write the layers in the value layers" -}}
{{- end -}}
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
{{- if not $gpu -}}
{{- range $step := list "downgrade_after" "release_after" -}}
{{- if not (kindIs "invalid" (index $idle $step)) -}}
{{- fail (printf "%s.idle.%s: needs a gpu; a template without one can only stop_after" $path $step) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "gpushare-agent.checkIdleOrder" (dict "path" (printf "%s.idle" $path) "idle" $idle) -}}
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
{{- if $gpu -}}
{{- include "gpushare-agent.checkPromises" (dict "path" $path "gpu" $gpu "idle" $idle "share" $share) -}}
{{- end -}}
{{- if index $idle "release_resources" -}}
{{- include "gpushare-agent.checkReleaseResources" (dict "path" $path "template" .template) -}}
{{- end -}}
{{- end }}

{{- /* What a template promises that its own layer cannot keep. */ -}}
{{- define "gpushare-agent.checkPromises" -}}
{{- $path := .path -}}
{{- $layer := default "native" (index .gpu "layer") -}}
{{- if ne $layer "native" -}}
{{- $memory := default dict (index .gpu "memory") -}}
{{- if hasKey $memory "engine" -}}
{{- fail (printf "%s.gpu.memory.engine: the memory engine is a part of the layer native: remove the line" $path) -}}
{{- end -}}
{{- if and (ne $layer "nvshare") (index $memory "oversubscribe") -}}
{{- fail (printf "%s.gpu.memory.oversubscribe: the layer %s does not move GPU memory to host memory: write oversubscribe: false, or remove the line" $path $layer) -}}
{{- end -}}
{{- $own := default (printf "%v%%" (round (mulf .share 100.0) 0)) (index $memory "guarantee") -}}
{{- if and (index $memory "guarantee") (has $layer (list "time-slicing" "nvshare")) -}}
{{- fail (printf "%s.gpu.memory.guarantee: the layer %s does not divide GPU memory: remove the line" $path $layer) -}}
{{- end -}}
{{- $limit := index $memory "limit" -}}
{{- if not (kindIs "invalid" $limit) -}}
{{- $limit = trim (toString $limit) -}}
{{- if has $layer (list "time-slicing" "nvshare" "kai" "dra") -}}
{{- if ne $limit "100%" -}}
{{- fail (printf "%s.gpu.memory.limit: the layer %s does not limit GPU memory: remove the line" $path $layer) -}}
{{- end -}}
{{- else if ne $limit (trim (toString $own)) -}}
{{- fail (printf "%s.gpu.memory.limit: with the layer %s a session has the memory of its guarantee (%v), and no more: remove the line" $path $layer $own) -}}
{{- end -}}
{{- end -}}
{{- range $action := list "downgrade_after" "release_after" -}}
{{- if not (kindIs "invalid" (index $.idle $action)) -}}
{{- fail (printf "%s.idle.%s: with the layer %s an idle server keeps its GPU until it stops: write stop_after alone" $path $action $layer) -}}
{{- end -}}
{{- end -}}
{{- if and (has $layer (list "time-slicing" "mps")) (gt .share 0.5) (lt .share 1.0) -}}
{{- fail (printf "%s.gpu.fraction: a part of a GPU with the layer %s is at most 0.50: write 0.50 or less, or count: 1" $path $layer) -}}
{{- end -}}
{{- if and (eq $layer "nvshare") (gt (int (default 1 (index .gpu "count"))) 1) -}}
{{- fail (printf "%s.gpu.count: nvshare gives a server one GPU: write count: 1, or a fraction" $path) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What `gpushare templates check` refuses in layers.yaml and values.schema.json cannot say. */ -}}
{{- define "gpushare-agent.checkLayers" -}}
{{- range $place, $rule := .rules -}}
{{- range $name, $_ := $rule.options -}}
{{- if ne $name $rule.layer -}}
{{- fail (printf "layers.rules.%d: options of %s have no effect in a rule of layer %s: move them to a rule of that layer" $place $name $rule.layer) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Kubernetes lowers a request in place only where the pod's QoS class stays. */ -}}
{{- define "gpushare-agent.checkReleaseResources" -}}
{{- $path := printf "%s.idle.release_resources" .path -}}
{{- $kept := .template.idle.release_resources -}}
{{- $resources := default dict (index .template "resources") -}}
{{- if kindIs "invalid" (index .template.idle "release_after") -}}
{{- fail (printf "%s: needs release_after" $path) -}}
{{- end -}}
{{- if and (kindIs "invalid" (index $kept "cpu")) (kindIs "invalid" (index $kept "memory")) -}}
{{- fail (printf "%s: give cpu or memory, or both" $path) -}}
{{- end -}}
{{- $fixed := 0 -}}
{{- range $name := list "cpu" "memory" -}}
{{- $less := index $kept $name -}}
{{- $given := default dict (index $resources $name) -}}
{{- $guarantee := index $given "guarantee" -}}
{{- $limit := index $given "limit" -}}
{{- if not (kindIs "invalid" $less) -}}
{{- if eq (float64 (include "gpushare-agent.amount" $less)) 0.0 -}}
{{- fail (printf "%s.%s: must be more than 0" $path $name) -}}
{{- end -}}
{{- if kindIs "invalid" $guarantee -}}
{{- fail (printf "%s.%s: needs resources.%s.guarantee; a limit alone is requested in full" $path $name $name) -}}
{{- end -}}
{{- if ge (float64 (include "gpushare-agent.amount" $less)) (float64 (include "gpushare-agent.amount" $guarantee)) -}}
{{- fail (printf "%s.%s: %v must be less than resources.%s.guarantee (%v)" $path $name $less $name $guarantee) -}}
{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" $limit) -}}
{{- if kindIs "invalid" $guarantee -}}
{{- $fixed = add1 $fixed -}}
{{- else if eq (float64 (include "gpushare-agent.amount" $guarantee)) (float64 (include "gpushare-agent.amount" $limit)) -}}
{{- $fixed = add1 $fixed -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq (int $fixed) 2 -}}
{{- fail (printf "%s: Kubernetes does not lower the requests of a server whose guarantees of cpu and memory are its limits; give one limit that is more than its guarantee" $path) -}}
{{- end -}}
{{- end }}

{{- /* The number that a quantity like 4, "500m" or "4Gi" stands for. */ -}}
{{- define "gpushare-agent.amount" -}}
{{- $units := dict "m" 0.001 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- if kindIs "string" . -}}
{{- $number := float64 (regexFind "[0-9]+(\\.[0-9]+)?" .) -}}
{{- $unit := regexFind "[a-zA-Z]+" . | trimSuffix "B" -}}
{{- mulf $number (default 1.0 (get $units $unit)) -}}
{{- else -}}
{{- float64 . -}}
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

{{- /* What `gpushare templates check` refuses in quotas.yaml and values.schema.json cannot say. */ -}}
{{- define "gpushare-agent.checkQuotas" -}}
{{- $seen := dict -}}
{{- range $name, $group := .groups -}}
{{- $_ := set $seen $name "a group" -}}
{{- end -}}
{{- range $name, $group := .groups -}}
{{- $path := printf "quotas.groups.%s" $name -}}
{{- $group = default dict $group -}}
{{- include "gpushare-agent.checkQuota" (dict "path" $path "quota" $group) -}}
{{- range $team, $quota := $group.teams -}}
{{- include "gpushare-agent.checkQuota" (dict "path" (printf "%s.teams.%s" $path $team) "quota" (default dict $quota)) -}}
{{- if hasKey $seen $team -}}
{{- fail (printf "%s.teams.%s: %s is %s already" $path $team $team (index $seen $team)) -}}
{{- end -}}
{{- $_ := set $seen $team (printf "a team of %s" $name) -}}
{{- end -}}
{{- if and $group.teams (or (not (kindIs "invalid" $group.servers)) $group.per_user) -}}
{{- fail (printf "%s: a group with teams has no servers of its own: give servers and per_user in the teams" $path) -}}
{{- end -}}
{{- end -}}
{{- range $name, $quota := .users -}}
{{- include "gpushare-agent.checkQuota" (dict "path" (printf "quotas.users.%s" $name) "quota" (default dict $quota)) -}}
{{- end -}}
{{- include "gpushare-agent.checkQuota" (dict "path" "quotas.default" "quota" (default dict .default)) -}}
{{- include "gpushare-agent.checkPositive" (dict "path" "quotas.half_life" "value" .half_life) -}}
{{- $reclaim := default dict .reclaim -}}
{{- include "gpushare-agent.checkPositive" (dict "path" "quotas.reclaim.stop_after" "value" $reclaim.stop_after) -}}
{{- end }}

{{- define "gpushare-agent.checkQuota" -}}
{{- $path := .path -}}
{{- $quota := .quota -}}
{{- range $field := list "guarantee" "maximum" -}}
{{- $value := index $quota $field -}}
{{- if not (kindIs "invalid" $value) -}}
{{- include "gpushare-agent.checkFraction" (dict "path" (printf "%s.%s" $path $field) "value" $value) -}}
{{- end -}}
{{- end -}}
{{- $weight := index (default dict $quota.per_user) "weight" -}}
{{- if not (kindIs "invalid" $weight) -}}
{{- include "gpushare-agent.checkFraction" (dict "path" (printf "%s.per_user.weight" $path) "value" $weight) -}}
{{- end -}}
{{- $guarantee := float64 (default 0 $quota.guarantee) -}}
{{- if not (kindIs "invalid" $quota.maximum) -}}
{{- if lt (float64 $quota.maximum) $guarantee -}}
{{- fail (printf "%s.maximum: %v is less than the guarantee (%v)" $path $quota.maximum $guarantee) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "gpushare-agent.checkPositive" -}}
{{- if not (kindIs "invalid" .value) -}}
{{- if le (float64 (include "gpushare-agent.seconds" .value)) 0.0 -}}
{{- fail (printf "%s: must be more than 0 s" .path) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The times of idle actions are more than 0, and each is more than the one before it. */ -}}
{{- define "gpushare-agent.checkIdleOrder" -}}
{{- $path := .path -}}
{{- $idle := default dict .idle -}}
{{- $before := 0.0 -}}
{{- $earlier := "" -}}
{{- range $step := list "downgrade_after" "release_after" "stop_after" -}}
{{- $written := index $idle $step -}}
{{- if not (kindIs "invalid" $written) -}}
{{- $seconds := float64 (include "gpushare-agent.seconds" $written) -}}
{{- if le $seconds 0.0 -}}
{{- fail (printf "%s.%s: must be more than 0 s" $path $step) -}}
{{- end -}}
{{- if le $seconds $before -}}
{{- fail (printf "%s.%s: %v must be more than %s" $path $step $written $earlier) -}}
{{- end -}}
{{- $before = $seconds -}}
{{- $earlier = printf "%s (%v)" $step $written -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What `gpushare templates check` refuses in idle.yaml and values.schema.json cannot say, but for the names of time zones. */ -}}
{{- define "gpushare-agent.checkIdlePolicy" -}}
{{- include "gpushare-agent.checkIdleTimes" (dict "path" "idlePolicy.defaults" "idle" .defaults) -}}
{{- range $name, $times := .groups -}}
{{- include "gpushare-agent.checkIdleTimes" (dict "path" (printf "idlePolicy.groups.%s" $name) "idle" $times) -}}
{{- end -}}
{{- include "gpushare-agent.checkIdleOrder" (dict "path" "idlePolicy.limits" "idle" .limits) -}}
{{- end }}

{{- define "gpushare-agent.checkIdleTimes" -}}
{{- include "gpushare-agent.checkIdleOrder" . -}}
{{- $smaller := index (default dict .idle) "downgrade_to" -}}
{{- if not (kindIs "invalid" $smaller) -}}
{{- include "gpushare-agent.checkFraction" (dict "path" (printf "%s.downgrade_to" .path) "value" $smaller) -}}
{{- end -}}
{{- end }}
