"""Django settings, read from the environment through `controlplane.env`. Safe by default; nothing listens beyond 127.0.0.1."""

from __future__ import annotations

import warnings
from urllib.parse import parse_qs, unquote, urlsplit

from csp.constants import NONCE, NONE, SELF, UNSAFE_INLINE

from controlplane import env

BASE_DIR = env.ROOT
DEBUG = env.flag("SWITCHYARD_DEBUG")
SECRET_KEY = env.secret("secret_key")
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]", *filter(None, env.text("SWITCHYARD_ALLOWED_HOSTS").split(","))]
CSRF_TRUSTED_ORIGINS = [*filter(None, env.text("SWITCHYARD_TRUSTED_ORIGINS").split(","))]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "channels",
    "csp",
    "django_htmx",
    "pghistory",
    "pghistory.admin",
    "pgtrigger",
    "ninja",
    "apps.tenancy",
    "apps.topology",
    "apps.flowcontrol",
    "apps.kvcache",
    "apps.routing",
    "apps.planning",
    "apps.telemetry",
    "apps.console",
    "controlplane",
]

MIDDLEWARE = [
    "controlplane.middleware.RequestIdMiddleware",
    "controlplane.middleware.RestProblemMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "csp.middleware.CSPMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "pghistory.middleware.HistoryMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]


def _database(url: str) -> dict[str, object]:
    """Django's form of a `postgresql://user:password@host:port/name?host=/socket/folder` URL."""
    parts = urlsplit(url)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": query.pop("host", parts.hostname or ""),
        "PORT": str(parts.port or query.pop("port", "")),
        "CONN_HEALTH_CHECKS": True,
        "CONN_MAX_AGE": 0,
        "OPTIONS": {"connect_timeout": 3, **query},
    }


DATABASES = {"default": _database(env.database_url() or "postgresql:///switchyard")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = env.redis_url() or "redis://127.0.0.1:6379/0"
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        # redis-py 8 sets a 5 s socket timeout, which would drop idle subscriptions.
        "CONFIG": {"hosts": [{"address": REDIS_URL, "socket_timeout": None}], "prefix": "switchyard.live"},
    }
}

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "login"

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / "staticfiles"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.FileSystemFinder",
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "apps.console.finders.WheelFinder",  # plotly.min.js, out of the plotly wheel
]
WHITENOISE_USE_FINDERS = True  # serves from the tree; collectstatic is for images
warnings.filterwarnings("ignore", message="No directory at: .*staticfiles")
WHITENOISE_MAX_AGE = 3600

BEHIND_TLS = env.flag("SWITCHYARD_TLS")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = BEHIND_TLS
SESSION_COOKIE_SAMESITE = "Lax"
SECURE_SSL_REDIRECT = BEHIND_TLS
SECURE_REDIRECT_EXEMPT = [r"^healthz$"]
SECURE_HSTS_SECONDS = 31536000 if BEHIND_TLS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = BEHIND_TLS
if BEHIND_TLS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
else:
    # Plain HTTP on the loopback interface is the default run; these checks speak of a TLS deployment.
    SILENCED_SYSTEM_CHECKS = ["security.W004", "security.W008", "security.W012", "security.W016"]
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF, NONCE],
        "style-src": [SELF, UNSAFE_INLINE],  # Plotly writes inline styles
        "img-src": [SELF, "data:"],
        "connect-src": [SELF],
        "object-src": [NONE],
        "base-uri": [SELF],
        "frame-ancestors": [NONE],
        # A form that leads to the sign-in provider is redirected there, and browsers hold that against this list.
        "form-action": [SELF, *filter(None, ["/".join(env.text("SWITCHYARD_OIDC_ISSUER").split("/")[:3])])],
    }
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 2_000_000

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(levelname)s %(name)s: %(message)s"}},
    "filters": {"brief": {"()": "controlplane.logs.Brief"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain", "filters": ["brief"]}},
    "root": {"handlers": ["console"], "level": "INFO"},
    "loggers": {"django.channels.server": {"level": "WARNING"}, "httpx": {"level": "WARNING"}},
}

AGENT_TOKEN = env.secret("agent_token")
