from django.apps import AppConfig


class FlowcontrolConfig(AppConfig):
    name = "apps.flowcontrol"
    label = "flowcontrol"
