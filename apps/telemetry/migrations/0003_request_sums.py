import time

import django.db.models.deletion
from django.db import migrations, models

from apps.telemetry import periods


def count_what_is_stored(apps, schema_editor):
    """The past was not summed up as it was stored."""
    record, total = apps.get_model('telemetry', 'RequestRecord'), apps.get_model('telemetry', 'RequestSum')
    for partition in apps.get_model('topology', 'Partition').objects.all():
        found = periods.counted(record.objects.filter(partition=partition))
        total.objects.bulk_create(
            (
                total(partition=partition, slot_s=slot_s, t0=t0, **columns)
                for (slot_s, t0), columns in found.items()
                if t0 >= time.time() - periods.SLOTS[slot_s]
            ),
            batch_size=500,
        )


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0002_alerts_channels_samples'),
        ('topology', '0002_existing_engines'),
    ]

    operations = [
        migrations.CreateModel(
            name='RequestSum',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('slot_s', models.PositiveIntegerField()),
                ('t0', models.BigIntegerField(help_text='start of the slot, unix seconds')),
                ('data', models.JSONField()),
                ('tenants', models.JSONField(default=dict, help_text='{tenant: what it used}')),
                ('partition', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='request_sums', to='topology.partition')),
            ],
            options={
                'ordering': ['t0'],
                'constraints': [models.UniqueConstraint(fields=('partition', 'slot_s', 't0'), name='one_sum_per_slot')],
            },
        ),
        migrations.RunPython(count_what_is_stored, migrations.RunPython.noop),
    ]
