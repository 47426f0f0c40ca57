// Renders conversations with the Go templates of `vox export --to ollama`, as Ollama executes them:
// text/template over a map with the messages, of which successive ones of a role are joined.
//
//	python benchmarks/ollama_template/cases.py > cases.json && go run benchmarks/ollama_template/main.go cases.json
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"text/template"
)

type Message struct{ Role, Content string }

type Model struct {
	Go    string
	Cases []struct {
		Messages []*Message
		Expected string
	}
}

func main() {
	raw, err := os.ReadFile(os.Args[1])
	check(err)
	var models map[string]Model
	check(json.Unmarshal(raw, &models))
	names := make([]string, 0, len(models))
	for name := range models {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		model, same := models[name], 0
		parsed, err := template.New("").Option("missingkey=zero").Parse(model.Go)
		check(err)
		for _, one := range model.Cases {
			var text bytes.Buffer
			check(parsed.Execute(&text, map[string]any{"Messages": one.Messages, "System": ""}))
			if text.String() == one.Expected {
				same++
			} else {
				fmt.Printf("%s: expected %q, found %q\n", name, one.Expected, text.String())
			}
		}
		fmt.Printf("%-14s %d of %d conversations\n", name, same, len(model.Cases))
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
