"""The part of an unchanged program that calls a model, for environments whose turns a program makes."""

ASK = """
import json, os, pathlib, sys, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "gpt-4o", "temperature": 0.9, "seed": 7, "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]
"""
"""Sampling of its own choice, which an episode leaves out."""
